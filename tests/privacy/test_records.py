"""A record that stands in the training set twice is found, however data sets are put together."""

import os
import random

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_lightning.datamodules import ImageFolder
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy import PrivacyPlan, PrivateStep
from dp_lightning.privacy.records import require_single_records
from dp_lightning.privacy.repeats import bytes_of, bytes_of_rows

X, Y = torch.randn(10, 3), torch.arange(10)


class Own(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index], index


class Folder(Own):
    """As torchvision lists files."""

    def __init__(self, *names):
        self.samples = [(name, 0) for name in names]

    def __len__(self):
        return len(self.samples)


class Wrapped(Own):
    """Adds a transform, as many data sets do."""

    def __init__(self, base, transform):
        self.base, self.transform = base, transform

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        return self.transform(self.base[index][0])


class Lazy(Own):
    """Knows where its files are."""

    def __init__(self, root, *files):
        self.root, self.files = root, list(files)

    def __len__(self):
        return len(self.files) or 10


class Captions(Own):
    """Each image with several texts."""

    def __getitem__(self, index):
        return X[index // 2], f"text {index}"


class Images(Own):
    """As PIL has them, at sizes of their own."""

    def __init__(self, colours, size):
        self.colours, self.size = colours, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        colour = self.colours[index % len(self.colours)]
        return Image.new("RGB", (4 + colour, 4), (colour, 0, 0)), index


class Named(Own):
    samples = [3] * 10


class Numbered(Folder):
    def __init__(self, *numbers):
        self.samples = [(number, f"{number}.png") for number in numbers]


class Listed(Folder):
    """Names below a folder."""

    def __init__(self, root):
        super().__init__("0.png", "1.png")
        self.root = root


class Reads(Own):
    """By a function of its own."""

    def __init__(self, read):
        self.name, self.read = "data", read or (lambda: None)


class Loaded(Own):
    """Two objects over one file, as torchvision's CIFAR10 reads it."""

    def __init__(self, rows, labels=None, transform=None):
        self.data, self.transform = rows, transform
        self.targets = [0] * len(rows) if labels is None else labels

    def __len__(self):
        return len(self.data)


class Paths(Own):
    def __init__(self, *paths):
        self.paths = list(paths)

    def __len__(self):
        return len(self.paths)


class Repeats(Own):
    """Hands out each row several times, with noise from a global generator, as augmentation would."""

    def __init__(self, size, number_of, base=X):
        self.size, self.number_of, self.base = size, number_of, base

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = torch.randn(3) + random.random() + np.random.rand()
        rows = X if self.base is None else self.base
        return {"image": rows[self.number_of(index)] + noise, "index": index}


class Computed(Own):
    """Knows its labels alone."""

    def __init__(self, offset):
        self.offset, self.targets, self.ids = offset, [0, 1] * 5, torch.zeros(10)
        self.scale, self.unsized = torch.tensor(1.0), iter([])


OWN = Own()
ROWS = TensorDataset(X, Y)
REPEATED = {
    "indices": (Subset(OWN, [0, 4, 4]), 1, 2),
    "negative index": (Subset(ROWS, [9, 3, -1]), 0, 2),
    "tensor of indices": (Subset(OWN, torch.tensor([5, 1, 5])), 0, 2),
    "indices of indices": (Subset(Subset(OWN, [7, 8, 7]), [1, 0, 2]), 1, 2),
    "a data set twice": (ConcatDataset([OWN, OWN]), 0, 10),
    "overlapping parts": (ConcatDataset([Subset(OWN, range(5)), Subset(OWN, range(4, 8))]), 4, 5),
    "rows of the same memory": (ConcatDataset([TensorDataset(X[:6]), TensorDataset(X[5:], Y[5:])]), 5, 6),
    "the same row again": (TensorDataset(X[:1].expand(4, 3)), 0, 1),
    "pairs twice": (StackDataset(Subset(OWN, [4, 2, 4]), Subset(ROWS, [1, 2, 1])), 0, 2),
    "named pairs twice": (ConcatDataset([StackDataset(x=ROWS, y=OWN), StackDataset(x=ROWS, y=OWN)]), 0, 10),
    "functions of one code that read": (ConcatDataset([Reads(None), Reads(None)]), 0, 10),
    "samples listed twice": (Numbered(0, 3, 5, 3), 1, 3),
    "one function that reads": (ConcatDataset([Reads(abs), Reads(abs)]), 0, 10),
    "files listed twice": (Folder("a.png", "b.png", "a.png"), 0, 2),
    "a file read twice": (ConcatDataset([Loaded(X.numpy()), Loaded(X.numpy().copy(), transform=len)]), 0, 10),
    "parts of a file read twice": (
        ConcatDataset([Subset(Loaded(X.numpy()), [1, 2]), Subset(Loaded(X.numpy().copy(), [1] * 10), [3, 2])]),
        1,
        3,
    ),
    "a copy of the rows": (ConcatDataset([TensorDataset(X, Y), TensorDataset(X.clone())]), 0, 10),
    "each row again": (Repeats(25, lambda index: index % 10), 0, 10),
    "each row again, of what it does not hold": (Repeats(24, lambda index: index % 6, None), 0, 6),
    "each row twice": (Repeats(20, lambda index: index // 2), 0, 1),
    "a part of rows again": (Subset(Repeats(20, lambda index: index % 10), [1, 5, 3, 15]), 1, 3),
    "images again": (Images(range(5), 10), 0, 5),
    "rows again in one tensor": (TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), 0, 10),
    "rows twice in one tensor": (TensorDataset(X.repeat_interleave(2, 0)), 0, 1),
    "of many bits": (TensorDataset(torch.cat([X, X]).bfloat16()), 0, 10),
    "two transforms of one data set": (ConcatDataset([Wrapped(ROWS, abs), Wrapped(ROWS, torch.neg)]), 0, 10),
    "a data set and a transform of it": (ConcatDataset([ROWS, Wrapped(Wrapped(ROWS, abs), abs)]), 0, 10),
    "a folder read twice": (ConcatDataset([Lazy("a"), Lazy("a")]), 0, 10),
    "transforms of a file read twice": (
        ConcatDataset([Wrapped(Loaded(rows), abs) for rows in (X.numpy(), X.numpy().copy())]),
        0,
        10,
    ),
    "a row that stands there sixteen times": (Subset(Repeats(160, lambda index: index // 16), [0, 16, 15]), 0, 2),
    "behind blank ones": (Images([0, 0, 0, 1, 2, 3, 4], 14), 0, 7),
    "a list read twice": (ConcatDataset([Paths("a", "b", "c"), Paths("a", "b", "c")]), 0, 3),
    "rows in a list": (ConcatDataset([Loaded(list(X)), Loaded([row.clone() for row in X])]), 0, 10),
    "a file in two folders": (ConcatDataset([Folder("a.png", "b.png"), Folder("c.png", "b.png")]), 1, 3),
}
SINGLE = {
    "own": OWN,
    "part": Subset(OWN, [3, 1, 2]),
    "parts": ConcatDataset([Subset(OWN, range(5)), Subset(OWN, range(5, 10))]),
    "two data sets": ConcatDataset([OWN, Own()]),
    "rows": ConcatDataset([TensorDataset(X[:5]), TensorDataset(X[5:])]),
    "equal rows": TensorDataset(torch.zeros(4, 3)),
    "rows again, each taken once": Subset(Repeats(20, lambda index: index % 10), [1, 5, 3, 14]),
    "rows of which each stands there twelve times": Subset(Repeats(120, lambda index: index // 12), range(0, 120, 12)),
    "all rows are equal": Repeats(20, lambda index: 0),
    "halves with ids of their own": ConcatDataset(
        [Loaded(rows, labels=list(range(10))) for rows in (X.numpy(), X.numpy() + 1)]
    ),
    "files of two sites": ConcatDataset([Lazy("a", "0.png", "1.png"), Lazy("b", "0.png", "1.png")]),
    "texts of images": Captions(),
    "lists": ConcatDataset([[(1, 2), (3, 4)], [(5, 6), (7, 8)]]),
    "rows of many bits": ConcatDataset([TensorDataset(X.bfloat16()), TensorDataset(2 * X.bfloat16())]),
    "sparse rows": ConcatDataset([TensorDataset(X.to_sparse()), TensorDataset(Y)]),
    "transforms of two data sets": ConcatDataset([Wrapped(ROWS, abs), Wrapped(TensorDataset(X + 1), abs)]),
    "two rows": Repeats(2, lambda index: index),
    "images": Images(range(10), 10),
    "two data sets with the same labels": ConcatDataset([Loaded(X.numpy()), Loaded(X.numpy() + 1)]),
    "two data sets that compute": ConcatDataset([Computed(0), Computed(10)]),
    "other lists": ConcatDataset([Paths("a", "b", "c"), Paths("d", "e", "f")]),
    "equal rows, and others": ConcatDataset([Loaded(torch.zeros(4, 3)), Loaded(torch.zeros(4, 3))]),
    "files": ConcatDataset([Folder("a.png"), Folder("b.png")]),
    "samples of another meaning": Named(),
    "a list": [1, 1, 2],
    "rows beside one that all share": TensorDataset(torch.zeros(1, 3).expand(10, 3), X),
    "rows without numbers": TensorDataset(torch.zeros(4, 0)),
    "names below other folders": ConcatDataset([Listed("one"), Listed("other")]),
    "numbered samples": ConcatDataset([Numbered(0, 1), Numbered(0, 1, 2)]),
    "other functions that read": ConcatDataset([Reads(abs), Reads(round)]),
    "images beside their labels": StackDataset(TensorDataset(X), TensorDataset(Y)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_record_that_stands_twice_is_refused_with_its_places(name):
    dataset, first, second = REPEATED[name]
    with pytest.raises(ConfigurationError, match=f"Examples {first} and {second} of the training set are the same"):
        require_single_records(dataset)
    plan = PrivacyPlan(num_train=len(dataset), expected_batch_size=2, num_steps=1, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(ConfigurationError, match="same record"):
        PrivateStep(nn.Linear(3, 1), lambda batch: batch[0].sum(), dataset, plan=plan)


def test_looking_at_elements_changes_no_random_numbers():
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    require_single_records(Repeats(10, lambda index: index))
    assert (random.getstate(), str(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_an_element_that_cannot_be_read_says_so_where_it_is_used():
    require_single_records(Repeats(30, lambda index: index))  # of 10 rows


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("kind", [ImageFolder, torchvision.datasets.ImageFolder])
def test_a_file_that_is_linked_is_the_same_record(tmp_path, kind, link):
    files = [tmp_path / "train" / name for name in ("a/0.png", "a/1.png", "b/l0.png")]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)

    def dataset():
        if kind is not ImageFolder:
            return kind(tmp_path / "train")
        data = ImageFolder(str(tmp_path), image_size=8)
        data.setup("fit")
        return data.train_dataset

    require_single_records(dataset())
    files[2].unlink()
    link(files[0], files[2])
    with pytest.raises(ConfigurationError, match=r"Examples 0 and 2 .* same record.*linked twice"):
        require_single_records(dataset())


@pytest.mark.parametrize("name", SINGLE)
def test_a_record_that_stands_once_is_taken(name):
    require_single_records(SINGLE[name])


ARRAYS = {
    "many rows": np.arange(3 * 9000, dtype=np.float32).reshape(9000, 3),
    "numbers": np.arange(5),
    "columns": np.arange(12.0).reshape(4, 3).T,
    "every other row": np.arange(24).reshape(8, 3)[::2],
    "truth values": np.array([[True, False], [False, False]]),
    "words": np.array(["one", "three"]),
    "empty rows": np.zeros((3, 0)),
    "no rows": np.zeros((0, 3)),
    "a tensor": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "a tensor of numbers": torch.arange(5000, dtype=torch.int16),
    "bfloat16": torch.ones(3, 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_rows_are_read_together_as_one_by_one(name):
    array = ARRAYS[name]
    assert list(bytes_of_rows(array)) == [bytes_of(row) for row in array]


def test_rows_that_are_not_in_memory_are_not_read():
    assert bytes_of_rows(np.array([[1], None], dtype=object)) is None
    assert bytes_of_rows(torch.eye(2).to_sparse()) is None
