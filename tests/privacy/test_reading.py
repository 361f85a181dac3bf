"""Collation sees one example at a time, and keeps nothing of it; the data set may keep what it likes."""

import pickle
import warnings
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dp_lightning.errors import DataError, ModelError
from dp_lightning.privacy.reading import ExampleReader, flatten, stacked, unflatten
from dp_lightning.privacy.sampling import PhysicalBatch

PLACES = [[PhysicalBatch(0, piece, (2 * piece, 2 * piece + 1), pieces=4)] for piece in range(3)]


class Numbers(Dataset):
    """Keeps a cache."""

    def __init__(self):
        self.cache, self.seen = {}, []

    def __getitem__(self, index):
        self.seen.append(index)
        return self.cache.setdefault(index, torch.full((2,), float(index)))

    def __len__(self):
        return 6


class Collate:
    """May lead to the data set."""

    def __init__(self, dataset):
        self.dataset, self.last, self.mean, self.seen = dataset, 0.0, torch.zeros(2), []

    def __call__(self, examples):
        return default_collate(examples)


class AddsTheLast(Collate):
    def __call__(self, examples):
        before, self.last = self.last, float(examples[0][0])
        return default_collate(examples) + before


class AddsTheMean(Collate):
    def __call__(self, examples):
        self.mean += examples[0]
        return default_collate(examples) + self.mean


class Appends(Collate):
    def __call__(self, examples):
        self.seen.append(float(examples[0][0]))
        return default_collate(examples)


def first(items):
    return items[0]


def read(collate, **kwargs):
    dataset = Numbers()
    reader = ExampleReader(dataset, collate(dataset))
    batches = DataLoader(reader, batch_sampler=PLACES, collate_fn=first, **kwargs)
    return torch.cat([batch.examples for batch in batches])[:, 0, 0].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_caches_of_a_data_set_are_no_state_of_collation(workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(Collate, num_workers=workers) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:Reading an example changes collate_fn.last")
def test_a_value_that_collation_keeps_is_put_back_before_the_next_example(workers):
    assert read(AddsTheLast, num_workers=workers) == [0, 1, 2, 3, 4, 5]


def test_what_is_put_back_is_named():
    with pytest.warns(UserWarning, match=r"collate_fn\.last"):
        read(AddsTheLast)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("collate", "name"), [(AddsTheMean, "mean"), (Appends, "seen")])
def test_what_cannot_be_put_back_is_refused_by_name(collate, name, workers):
    with pytest.raises(ModelError, match=rf"Reading an example changes collate_fn\.{name}"):
        read(collate, num_workers=workers)


def test_generators_may_advance():
    class Draws(Collate):
        def __init__(self, dataset):
            super().__init__(dataset)
            self.numbers, self.torchs = np.random.default_rng(0), torch.Generator()

        def __call__(self, examples):
            shift = self.numbers.random() + torch.rand((), generator=self.torchs)
            return default_collate(examples) + 0 * shift

    assert read(Draws) == [0, 1, 2, 3, 4, 5]


def test_a_reader_that_has_read_can_be_sent_to_a_worker():
    dataset = Numbers()
    reader = ExampleReader(dataset, Collate(dataset))
    before = reader[PLACES[0][0]].examples
    assert torch.equal(pickle.loads(pickle.dumps(reader))[PLACES[0][0]].examples, before)


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


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    name: str = "a"


@dataclass
class IsADict(dict):
    x: int = 0


def ones():
    return torch.ones(1, 2)


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        (Encoding({"x": ones(), "y": [ones(), "name"]}), 4),  # one is _n_sequences
        (UserDict(x=ones()), 1),
        (Pair(ones(), ones()), 2),
        (Frozen(ones(), {"pair": Pair(ones(), ones())}), 3),
        (Slotted(ones()), 2),
        ({"a": [UserDict(x=Slotted(ones()))], "b": (ones(), None)}, 3),
        ([IsADict(1), SimpleNamespace(x=ones()), Pair], 3),  # not opened
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


def test_a_structure_is_that_of_classes_names_and_kinds_of_leaves_only():
    x, y = ones(), torch.zeros(3, 3)
    assert flatten(Pair(x, x))[1] == flatten(Pair(y, y))[1]
    assert flatten(["a", x])[1] == flatten(["b", x])[1]
    trees = [
        [x, x],
        [x, None],
        [x, "a"],
        [x, x.double()],
        [x, UserDict(x=x)],
        [x, UserDict(y=x)],
        [x, Encoding({"x": x})],
        [x, Pair(x, x)],
        [x, Pair(x, None)],
        Pair(x, x),
    ]
    for index, tree in enumerate(trees):
        assert all((flatten(tree)[1] == flatten(other)[1]) == (index == place) for place, other in enumerate(trees))


def test_what_is_opened_is_stacked_by_its_tensors():
    batch = stacked([{"b": Encoding({"x": ones() * i, "mask": None, "name": str(i)})} for i in range(3)])["b"]
    assert type(batch) is Encoding
    assert batch.x[:, 0, 0].tolist() == [0, 1, 2]
    assert (batch.mask, batch.name) == (None, ("0", "1", "2"))


@pytest.mark.parametrize(
    "other", [{"x": None}, {"x": "a"}, {"y": ones()}, {"x": ones().double()}, Pair(ones(), ones())]
)
def test_examples_of_different_structure_are_refused(other):
    with pytest.raises(DataError, match="different structure"):
        stacked([{"x": ones()}, other])
