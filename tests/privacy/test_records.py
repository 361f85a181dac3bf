"""A record that stands in the training set twice is found, however data sets are put together."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_lightning.datamodules import ImageFolder
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.records import require_single_records, shared_places

X, Y = torch.randn(10, 3), torch.arange(10)


class Own(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError("no element is read")


class Wrapped(Own):
    """Adds a transform, as many data sets do."""

    def __init__(self, base, transform):
        self.base, self.transform = base, transform

    def __len__(self):
        return len(self.base)


class Loaded(Own):
    """Two objects over one file, as torchvision's CIFAR10 reads it."""

    def __init__(self, rows, labels=None, transform=None, root="data"):
        self.data, self.transform, self.root = rows, transform, root
        self.targets = [0] * len(rows) if labels is None else labels

    def __len__(self):
        return len(self.data)


class Paths(Own):
    def __init__(self, root, *paths):
        self.root, self.samples = root, [(path, 0) for path in paths]

    def __len__(self):
        return len(self.samples)


OWN = Own()
ROWS = TensorDataset(X, Y)
REPEATED = {
    "indices": (Subset(OWN, [0, 4, 4]), 1, 2),
    "negative index": (Subset(ROWS, [9, 3, -1]), 0, 2),
    "tensor of indices": (Subset(OWN, torch.tensor([5, 1, 5])), 0, 2),
    "indices of indices": (Subset(Subset(OWN, [7, 8, 7]), [1, 0, 2]), 1, 2),
    "a data set twice": (ConcatDataset([OWN, OWN]), 0, 10),
    "overlapping parts": (ConcatDataset([Subset(OWN, range(5)), Subset(OWN, range(4, 8))]), 4, 5),
    "pairs twice": (StackDataset(Subset(OWN, [4, 2, 4]), Subset(ROWS, [1, 2, 1])), 0, 2),
    "a file read twice": (ConcatDataset([Loaded(X.numpy()), Loaded(X.numpy().copy(), transform=len)]), 0, 10),
    "a copy of the tensors": (ConcatDataset([TensorDataset(X, Y), TensorDataset(X.clone(), Y)]), 0, 10),
    "two transforms of one data set": (ConcatDataset([Wrapped(ROWS, abs), Wrapped(ROWS, torch.neg)]), 0, 10),
    "a data set and a transform of it": (ConcatDataset([ROWS, Wrapped(Wrapped(ROWS, abs), abs)]), 0, 10),
    "a folder listed twice": (ConcatDataset([Paths("a", "0.png", "1.png"), Paths("a", "0.png", "1.png")]), 0, 2),
}
SINGLE = {
    "sparse rows": ConcatDataset([TensorDataset(X.to_sparse()), TensorDataset(Y)]),
    "part": Subset(OWN, [3, 1, 2]),
    "parts": ConcatDataset([Subset(OWN, range(5)), Subset(OWN, range(5, 10))]),
    "two data sets": ConcatDataset([OWN, Own()]),
    "rows": ConcatDataset([TensorDataset(X[:5]), TensorDataset(X[5:])]),
    "transforms of two data sets": ConcatDataset([Wrapped(ROWS, abs), Wrapped(TensorDataset(X + 1), abs)]),
    "two data sets with the same labels": ConcatDataset([Loaded(X.numpy()), Loaded(X.numpy() + 1)]),
    "names below other folders": ConcatDataset([Paths("a", "0.png"), Paths("b", "0.png")]),
    "images beside their labels": StackDataset(TensorDataset(X), TensorDataset(Y)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_record_that_stands_twice_is_refused_with_its_places(name):
    dataset, first, second = REPEATED[name]
    with pytest.raises(ConfigurationError, match=f"Examples {first} and {second} of the training set are the same"):
        require_single_records(dataset)


@pytest.mark.parametrize("name", SINGLE)
def test_a_record_that_stands_once_is_taken(name):
    require_single_records(SINGLE[name])


@pytest.mark.parametrize("kind", [ImageFolder, torchvision.datasets.ImageFolder])
def test_a_folder_of_files_is_known_again(tmp_path, kind):
    for number in range(4):
        file = tmp_path / "train" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file)

    def dataset():
        if kind is not ImageFolder:
            return kind(str(tmp_path / "train"))
        data = ImageFolder(str(tmp_path), image_size=8)
        data.setup("fit")
        return data.train_dataset

    require_single_records(dataset())
    with pytest.raises(ConfigurationError, match=r"Examples 0 and \d .* same record"):
        require_single_records(ConcatDataset([dataset(), dataset()]))


def test_the_places_of_shared_records():
    assert shared_places(ConcatDataset([Own(), Subset(OWN, [7, 8])]), Subset(OWN, [1, 8]), range(12)) == [11]
    rows = Loaded(np.zeros((10, 3)), labels=list(range(10)))
    assert shared_places(rows, Subset(Loaded(np.zeros((10, 3)), labels=list(range(10))), [3, 4]), [4, 5]) == [4]
