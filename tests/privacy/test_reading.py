"""Examples are read one by one, as trees that are opened, stacked and built again; workers read as the process does."""

import pickle
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dp_lightning.errors import DataError
from dp_lightning.privacy.reading import ExampleReader, Reading, flatten, stacked, unflatten
from dp_lightning.privacy.sampling import PhysicalBatch

PLACES = [[PhysicalBatch(0, piece, (2 * piece, 2 * piece + 1), pieces=4)] for piece in range(3)]


class Numbers(Dataset):
    """Keeps a cache."""

    def __init__(self):
        self.cache = {}

    def __getitem__(self, index):
        return self.cache.setdefault(index, torch.full((2,), float(index)))

    def __len__(self):
        return 6


def double(batch):
    return 2 * batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_reads_in_workers_as_in_the_process_and_prepares_after_collation(workers):
    reader = ExampleReader(Numbers(), Reading(prepare=double))
    reader[PLACES[0][0]]  # one that has read can be sent to a worker
    reader = pickle.loads(pickle.dumps(reader))
    batches = DataLoader(reader, batch_sampler=PLACES, collate_fn=lambda items: items[0], num_workers=workers)
    (leaves,) = zip(*(batch.leaves for batch in batches), strict=True)
    assert torch.cat(leaves)[:, 0, 0].tolist() == [0, 2, 4, 6, 8, 10]


class Encoding(UserDict):
    """As HuggingFace's BatchEncoding: attributes beside the dict, and keys as attributes."""

    def __init__(self, data):
        super().__init__(data)
        self._encodings, self._n_sequences = None, 1

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    more: dict = field(default_factory=dict)


def ones():
    return torch.ones(1, 2)


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        (Encoding({"x": ones(), "y": [ones(), "name"]}), 4),  # one is _n_sequences
        (UserDict(x=ones()), 1),
        (Pair(ones(), ones()), 2),
        (Frozen(ones(), {"pair": Pair(ones(), ones())}), 3),
        ({"a": [UserDict(x=Pair(ones(), ones()))], "b": (ones(), None)}, 3),
        ([SimpleNamespace(x=ones()), Pair], 2),  # not opened
        (None, 0),
    ],
)
def test_user_dicts_and_dataclasses_are_opened_and_built_again(tree, leaves):
    found, structure = flatten(tree)
    assert len(found) == leaves
    again = unflatten(found, structure)
    assert type(again) is type(tree)
    parts, same = flatten(again)
    assert same == structure
    assert all(one is other for one, other in zip(found, parts, strict=True))


def test_what_is_opened_is_stacked_by_its_tensors():
    examples = [{"b": Encoding({"x": ones() * i, "mask": None, "name": str(i)})} for i in range(3)]
    leaves, structure = stacked([flatten(example) for example in examples])
    (x,) = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert x[:, 0, 0].tolist() == [0, 1, 2]
    assert ["0", "1", "2"] in [leaf for leaf in leaves if isinstance(leaf, list)]
    of_one = unflatten([leaf[1] for leaf in leaves], structure)["b"]
    assert (type(of_one), of_one.mask, of_one.name, of_one.x.tolist()) == (Encoding, None, "1", [[1, 1]])


class Views(Dataset):
    """Gives the next view of an element each time; element 3 has another kind than the others, where one is given."""

    def __init__(self, make, other):
        self.make, self.other, self.seen = make, other or make, 0

    def __getitem__(self, index):
        self.seen += 1
        return (self.other if index == 3 else self.make)(10.0 * index + self.seen)

    def __len__(self):
        return 6


def image(number):
    return torch.full((1, 2, 2), number)


@pytest.mark.parametrize("augmult", [1, 3])
@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda n: (image(n), int(n)), None),
        (lambda n: [image(n), n, n > 11, torch.tensor(n, dtype=torch.float64)], None),
        (lambda n: (image(n).numpy(), {"label": n}), None),
        (lambda n: (torch.rand(2, 2, 3).movedim(-1, 0).mul(0).add(n), int(n)), None),
        (lambda n: (), None),
        (lambda n: (image(n), int(n)), lambda n: None),
        (lambda n: (image(n), image(n)), lambda n: (torch.ones(1, 2, 3), image(n))),
        (lambda n: (image(n), int(n)), lambda n: (image(n), n)),
    ],
    ids=[
        "image and number",
        "all kinds",
        "not simple",
        "channels last",
        "empty",
        "unread",
        "other shape",
        "other type",
    ],
)
def test_tuples_are_read_at_once_as_one_by_one(make, other, augmult):
    """The quick way makes what collation of each example makes, or refuses what that refuses."""
    results = []
    for collate in (default_collate, lambda views: default_collate(views)):
        reader = ExampleReader(Views(make, other), Reading(collate_fn=collate, augmult=augmult))
        try:
            results.append(reader[PhysicalBatch(0, 0, (4, 3, 0, 5), pieces=1)])
        except DataError as error:
            results.append(str(error))
    quick, slow = results
    if isinstance(slow, str):
        assert quick == slow
        return
    assert (quick.structure, quick.counted.tolist()) == (slow.structure, slow.counted.tolist())
    torch.testing.assert_close(quick.leaves, slow.leaves, rtol=0, atol=0, check_stride=True)


class Persons(TensorDataset):
    groups = (0, 1, 0, 2, 1, 0)


@pytest.mark.parametrize("images_per_group", [None, 2])
@pytest.mark.parametrize("permuted", [False, True])
def test_tensors_are_read_at_once_as_one_by_one(permuted, images_per_group):
    images = torch.arange(72.0).view(6, 2, 2, 3)
    data = Persons(images.movedim(-1, 1) if permuted else images, torch.arange(6))
    quick, slow = (
        ExampleReader(data, Reading(collate_fn=collate, augmult=2, images_per_group=images_per_group), seed=0)[
            PhysicalBatch(0, 0, (2, 0), pieces=1)
        ]
        for collate in (default_collate, lambda views: default_collate(views))
    )
    assert (quick.structure, quick.counted.tolist()) == (slow.structure, slow.counted.tolist())
    torch.testing.assert_close(quick.leaves, slow.leaves, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize(
    "other", [{"x": None}, {"x": "a"}, {"y": ones()}, {"x": ones().double()}, Pair(ones(), ones())]
)
def test_examples_of_different_structure_are_refused(other):
    with pytest.raises(DataError, match="different structure"):
        stacked([flatten({"x": ones()}), flatten(other)])
