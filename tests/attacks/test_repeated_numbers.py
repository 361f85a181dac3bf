"""Nobody can repeat what is random in a step: two runs on the same examples drop out other units.

Code of the user that seeds the global generators, or keeps a state of them, must not make dropout follow from it:
then the masks would hang on an example's place in its physical batch.
"""

import random

import numpy as np
import pytest
import torch
from harness import Attack, N, run
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from dp_lightning.errors import DpLightningError


class Dropout(Attack):
    def training_step(self, x, y):
        return super().training_step(F.dropout(x, 0.5), y)


class SeededBeforeTheRun(Dropout):
    def __init__(self):
        super().__init__()
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)


class SeededBeforeEachStep(Dropout):
    """As in a hook, such as on_train_batch_start or on_train_epoch_start."""

    def between(self, step):
        torch.manual_seed(step)


class StateRestoredBeforeEachStep(Dropout):
    """As a callback does that draws its own numbers for validation."""

    def __init__(self):
        super().__init__()
        self.rng = torch.manual_seed(0).get_state()

    def between(self, step):
        torch.set_rng_state(self.rng)


class SeededByTheDataSet(Dropout):
    """A fixed augmentation for each example."""

    @staticmethod
    def dataset(x, y):
        class Rows(TensorDataset):
            def __getitem__(self, index):
                torch.manual_seed(index)
                return super().__getitem__(index)

        return Rows(x, y)


class SeededByCollation(Dropout):
    def collate_fn(self, examples):
        torch.manual_seed(0)
        return default_collate(examples)


class SeededInTheStep(Dropout):
    def training_step(self, x, y):
        torch.manual_seed(0)
        return super().training_step(x, y)


class SeededAfterTheStep(Dropout):
    """Of the example before, under one_by_one."""

    def training_step(self, x, y):
        loss = super().training_step(x, y)
        torch.manual_seed(0)
        return loss


class SeededPython(Attack):
    """The data set draws from Python and NumPy."""

    def between(self, step):
        random.seed(step)
        np.random.seed(step)

    @staticmethod
    def dataset(x, y):
        class Rows(TensorDataset):
            def __getitem__(self, index):
                row, label = super().__getitem__(index)
                return row * (random.random() + np.random.rand()), label

        return Rows(x, y)


class GeneratorOfTheDataSet(Attack):
    """Made before the run from a seed that is known."""

    @staticmethod
    def dataset(x, y):
        class Rows(TensorDataset):
            generator = torch.Generator().manual_seed(0)
            numbers = np.random.default_rng(0)

            def __getitem__(self, index):
                row, label = super().__getitem__(index)
                return row * (torch.rand((), generator=self.generator) + self.numbers.random()), label

        return Rows(x, y)


CASES = [
    pytest.param(
        kind,
        mode,
        id=f"{kind.__name__}-{mode}",
    )
    for kind in (
        Dropout,
        SeededBeforeTheRun,
        SeededBeforeEachStep,
        StateRestoredBeforeEachStep,
        SeededByTheDataSet,
        SeededByCollation,
        SeededInTheStep,
        SeededAfterTheStep,
        SeededPython,
        GeneratorOfTheDataSet,
    )
    for mode in ("together", "one_by_one")
    if (kind, mode)
    != (SeededInTheStep, "one_by_one")  # each example alone has the same masks, whichever others there are
]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_two_runs_draw_other_numbers_in_every_step(kind, mode):
    try:
        first = run(kind, list(range(N)), mode=mode)
        second = run(kind, list(range(N)), mode=mode, transcript=first)
    except DpLightningError as error:
        message = str(error)
        refused = "seed" in message or "generator" in message
        assert refused, message
        return
    for one, other in zip(first.sums, second.sums, strict=True):
        assert not torch.equal(one, other)
