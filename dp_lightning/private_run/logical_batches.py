"""One Lightning batch is one logical step: the loader that Lightning sees, and the one that reads the examples.

Lightning's loader has one element for each logical step of an epoch, which is its number and holds no example. So all
that Lightning counts is logical steps: ``global_step``, ``batch_idx``, schedules, validation, checkpoints. The physical
batches of a step are read while the step runs, by workers that read ahead over the steps of the epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from dp_lightning.errors import ModelError
from dp_lightning.privacy.reading import ExampleBatch
from dp_lightning.privacy.sampling import PhysicalBatch
from dp_lightning.privacy.step import PrivateStep


@dataclass
class LogicalBatch:
    """What Lightning and its hooks get for a step.

    Attributes:
        step: number of the step in its epoch, a tensor (), from which Lightning takes a batch size of one.
    """

    step: Tensor

    def __getitem__(self, key: object) -> NoReturn:
        raise ModelError(
            "A hook uses the batch that it is given. In a private fit it holds no example: only training_step and the "
            "batch transfer hooks see examples, one at a time. Move the code there, and take numbers out by self.log."
        )

    # Python would iterate by __getitem__; Lightning looks for a batch size in what can be iterated.
    __iter__ = None


class LogicalLoader:
    """A loader with one element for each logical step of an epoch.

    Args:
        loader: the user's training loader.
        num_steps: number of steps of an epoch.
        position: returns how many steps of the epoch are taken. The loader calls it when its first element is asked
            for, since Lightning makes the iterator before it restores its counts from a checkpoint.
    """

    def __init__(self, loader: DataLoader[Any], num_steps: int, position: Callable[[], int]) -> None:
        self.dataset, self._num_steps, self._position = loader.dataset, num_steps, position

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[LogicalBatch]:
        for step in range(self._position(), len(self)):
            yield LogicalBatch(torch.tensor(step))

    def state_dict(self) -> dict[str, Any]:
        """An empty state: a loader without this method is taken for one that cannot resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing: `position` follows Lightning's own counts."""


class PhysicalLoader:
    """Reads the physical batches of one step after the other, ahead over the steps of an epoch.

    Args:
        loader: the user's training loader, whose workers and settings are used.
        private: the mechanism, which draws and reads the examples.
    """

    def __init__(self, loader: DataLoader[Any], private: PrivateStep) -> None:
        self._private, self._places = private, _Places(private)
        self._loader: DataLoader[Any] = DataLoader(
            private.reader,
            sampler=self._places,
            batch_size=None,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self._reads: Iterator[ExampleBatch] = iter(())

    def next_step(self, num_steps: int) -> Iterator[ExampleBatch]:
        """The physical batches of the next step.

        Args:
            num_steps: number of steps that are left of the epoch, the next step included.
        """
        self._private.require_budget()
        batch, step = next(self._reads, None), self._private.record.ledger.num_steps
        if batch is None or batch.place.step != step or batch.place.piece:  # an epoch begins, or a step was abandoned
            self._places.steps = range(step, min(step + num_steps, self._private.plan.num_steps))
            self._reads = iter(self._loader)
            batch = next(self._reads)
        yield batch
        while not batch.place.last:
            batch = next(self._reads)
            yield batch

    def close(self) -> None:
        """Ends the workers: left alone, each may hold up the end of a process with a GPU for five seconds."""
        CombinedLoader(self._loader).reset()
        self._reads = iter(())  # holds those that are not persistent


class _Places(Sampler[PhysicalBatch]):
    """The places of the physical batches of some steps."""

    def __init__(self, private: PrivateStep) -> None:
        self._private, self.steps = private, range(0)

    def __iter__(self) -> Iterator[PhysicalBatch]:
        for step in self.steps:
            yield from self._private.physical_batches(step)
