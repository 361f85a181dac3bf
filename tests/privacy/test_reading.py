"""Collation sees one example at a time, and keeps nothing of it; the data set may keep what it likes."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dp_lightning.errors import ModelError
from dp_lightning.privacy.reading import ExampleReader
from dp_lightning.privacy.sampling import PhysicalBatch

PLACES = [[PhysicalBatch(0, piece, (2 * piece, 2 * piece + 1), False)] for piece in range(3)]


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
