"""One Lightning batch is one logical step: the loader that Lightning sees, and the one that reads the examples.

Lightning's loader has one element for each logical step of an epoch, which is its number and holds no example. So all
that Lightning counts is logical steps: ``global_step``, ``batch_idx``, schedules, validation, checkpoints. The physical
batches of a step are read while the step runs, by workers that read ahead over the steps of the epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.randomness import WorkerSeeding
from dp_lightning.privacy.reading import ExampleBatch
from dp_lightning.privacy.sampling import PhysicalBatch
from dp_lightning.privacy.step import PrivateStep


@dataclass
class LogicalBatch:
    """What Lightning and its hooks get of a step.

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
    """Has one element for each logical step of an epoch.

    Args:
        loader: the user's.
        num_steps: of an epoch.
        position: returns how many steps of the epoch are taken. It is asked for with the first element: Lightning makes
            the iterator before it restores its counts from a checkpoint.
    """

    def __init__(self, loader: DataLoader[Any], num_steps: int, position: Callable[[], int]) -> None:
        self.dataset, self._num_steps, self._position = loader.dataset, num_steps, position

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[LogicalBatch]:
        for step in range(self._position(), len(self)):
            yield LogicalBatch(torch.tensor(step))

    def state_dict(self) -> dict[str, Any]:
        """Nothing; a loader without it is taken for one that cannot resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: `position` follows Lightning's own counts."""


class PhysicalLoader:
    """Reads the physical batches of one step after the other, ahead over the steps of an epoch.

    Args:
        loader: the user's, whose workers and settings are used.
        private: draws and reads.
    """

    def __init__(self, loader: DataLoader[Any], private: PrivateStep) -> None:
        self._private, self._places = private, _Places(private)
        self._loader: DataLoader[Any] = DataLoader(
            private.reader,
            batch_sampler=self._places,
            num_workers=loader.num_workers,
            collate_fn=_single,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=WorkerSeeding(private.seed, private.ranks.rank, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self._reads: Iterator[ExampleBatch] = iter(())

    def next_step(self, num_steps: int) -> Iterator[ExampleBatch]:
        """The physical batches of the next step.

        Args:
            num_steps: that are left of the epoch, the next one included.
        """
        step = self._private.record.ledger.num_steps
        batch = next(self._reads, None)
        if batch is None or batch.place.step != step or batch.place.piece:  # an epoch begins, or a step was abandoned
            self._places.steps = range(step, min(step + num_steps, self._private.plan.num_steps))
            self._reads = iter(self._loader)
            batch = next(self._reads)
        yield batch
        while not batch.place.last:
            batch = next(self._reads)
            yield batch


class _Places(Sampler[list[PhysicalBatch]]):
    """The places of the physical batches of some steps."""

    def __init__(self, private: PrivateStep) -> None:
        self._private, self.steps = private, range(0)

    def __iter__(self) -> Iterator[list[PhysicalBatch]]:
        for step in self.steps:
            for place in self._private.physical_batches(step):
                yield [place]


def checked_loader(loader: Any) -> DataLoader[Any]:
    """The user's training loader.

    Raises:
        ConfigurationError: where its sampling cannot be replaced by Poisson sampling.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"train_dataloader is a {type(loader).__name__}; private training needs one torch.utils.data.DataLoader, "
            "whose order of the data it replaces by Poisson sampling."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "train_dataloader reads an IterableDataset. Poisson sampling needs a map-style data set with __len__ and "
            "__getitem__."
        )
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "train_dataloader has batch_size=None, so that collate_fn makes no batches. Private training needs batches "
            "of one example: give the loader a batch_size, such as 1, and let __getitem__ return one example. The size "
            "of a step is privacy.expected_batch_size."
        )
    if type(loader.batch_sampler) is not BatchSampler or not _is_ordinary(loader):
        raise ConfigurationError(
            f"train_dataloader has a sampler of its own ({_sampler_name(loader)}), which Poisson sampling replaces. "
            "Remove it; for a subset of the data use torch.utils.data.Subset."
        )
    return loader


def _is_ordinary(loader: DataLoader[Any]) -> bool:
    """Whether a loader takes each element once; Lightning gives that of several ranks a sampler around the user's."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.dataset is loader.dataset
    return isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)


def _sampler_name(loader: DataLoader[Any]) -> str:
    ordinary = type(loader.batch_sampler) is BatchSampler
    return type(loader.sampler if ordinary else loader.batch_sampler).__name__


def _single(items: list[Any]) -> Any:
    return items[0]
