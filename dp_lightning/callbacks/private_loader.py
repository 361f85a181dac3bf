"""Puts Poisson sampling under the training loader that the user wrote.

The loader's data set, collate function and workers are kept; its sampler and batch size are replaced. The new loader
has no length, since the number of physical batches of an epoch is random.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.sampling import PhysicalBatch, PoissonSampler, cut, epoch_end
from dp_lightning.ranks import Ranks


class PoissonBatchSampler(Sampler[list[int]]):
    """The physical batches of one epoch, each announced in ``announced`` in the order in which it will arrive.

    Args:
        sampler: draws logical batches.
        plan: fixes where epochs and the run end.
        max_physical_batch_size: most rows in a physical batch.
        augmult: K, how often each example follows itself in it; the data set's transform makes a view each time.
        steps_done: returns the number of logical steps in the ledger; the epoch goes on from there.
        ranks: the processes to which each logical batch is dealt out; this one's share comes from here.
    """

    def __init__(
        self,
        sampler: PoissonSampler,
        plan: PrivacyPlan,
        *,
        max_physical_batch_size: int,
        augmult: int,
        steps_done: Callable[[], int],
        ranks: Ranks,
    ) -> None:
        self.sampler, self.plan, self.ranks = sampler, plan, ranks
        self.most_examples, self.augmult, self.steps_done = max_physical_batch_size // augmult, augmult, steps_done
        self.announced: deque[PhysicalBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.announced.clear()
        start = self.steps_done()
        end = epoch_end(
            start,
            num_train=self.plan.num_train,
            expected_batch_size=self.plan.expected_batch_size,
            num_steps=self.plan.num_steps,
        )
        for step in range(start, end):
            draw, ranks = self.sampler.draw(step), self.ranks
            for batch in cut(draw, self.most_examples, rank=ranks.rank, num_ranks=ranks.size):
                self.announced.append(batch)
                yield [index for index in batch.indices for _ in range(self.augmult)]

    def loader_of(self, trainer: pl.Trainer) -> DataLoader[Any]:
        """The loader that the trainer reads from.

        Raises:
            ConfigurationError: when its batches are not these.
        """
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader) or loader.batch_sampler is not self:
            raise ConfigurationError(
                "The training loader's sampler was replaced after PrivacyCallback had set it. Set "
                "trainer.use_distributed_sampler: false and remove callbacks that exchange loaders."
            )
        return loader


def original_loader(loader: Any) -> DataLoader[Any]:
    """The user's loader, checked.

    Raises:
        ConfigurationError: when it is not one map-style DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"train_dataloader is a {type(loader).__name__}; private training needs one torch.utils.data.DataLoader."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "train_dataloader reads an IterableDataset. Poisson sampling needs a map-style data set with __len__ and "
            "__getitem__."
        )
    ordinary = isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    if type(loader.batch_sampler) is not BatchSampler or not (
        ordinary or isinstance(loader.sampler, SequentialSampler)
    ):
        raise ConfigurationError(
            f"train_dataloader has a sampler of its own ({type(loader.sampler).__name__}), which Poisson sampling "
            "replaces. Remove it; for a subset of the data use torch.utils.data.Subset."
        )
    return loader


def private_loader(loader: DataLoader[Any], batches: PoissonBatchSampler) -> DataLoader[Any]:
    """The user's loader with Poisson sampling instead of its sampler and batch size."""
    private: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    # Lightning gives every loader of a distributed run a sampler of its own, except where it finds this one. What is
    # read comes from the batch sampler.
    ranks = batches.ranks
    dealt: Any = DistributedSampler(loader.dataset, num_replicas=ranks.size, rank=ranks.rank)
    object.__setattr__(private, "sampler", dealt)
    return private


class PrivateSource(_DataLoaderSource):
    """Stands where the Trainer looks for the training loader, and hands out the private one."""

    def __init__(self, source: _DataLoaderSource, make: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
        super().__init__(source.instance, source.name)
        self._make = make

    def users(self) -> DataLoader[Any]:
        """The loader that the user wrote."""
        return original_loader(super().dataloader())

    def dataloader(self) -> Any:
        return self._make(self.users())
