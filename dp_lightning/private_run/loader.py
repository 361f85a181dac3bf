"""Replaces the sampling of the user's training loader by Poisson sampling.

The loader's data set, collate function and workers are kept; its sampler and batch size are replaced, and each example
is read by itself. The new loader has no length, since the number of physical batches of an epoch is random.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
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

from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_internals import LoaderSource, loader_source, set_loader_source
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.randomness import WorkerSeeding
from dp_lightning.privacy.reading import flatten
from dp_lightning.privacy.sampling import PhysicalBatch, epoch_end
from dp_lightning.privacy.step import PrivateStep
from dp_lightning.private_run.settings import PrivacySettings


class EpochBatches(Sampler[list[PhysicalBatch]]):
    """The places of the physical batches of one epoch, which starts after the steps in the ledger."""

    def __init__(self, private: PrivateStep) -> None:
        self.private = private

    def __iter__(self) -> Iterator[list[PhysicalBatch]]:
        plan, start = self.private.plan, self.private.record.ledger.num_steps
        end = epoch_end(
            start,
            num_train=plan.num_train,
            expected_batch_size=plan.expected_batch_size,
            num_steps=plan.num_steps,
        )
        for step in range(start, end):
            for place in self.private.physical_batches(step):
                yield [place]


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
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "train_dataloader has batch_size=None, so that collate_fn makes no batches. Private training needs batches "
            "of one example: give the loader a batch_size, such as 1, and let __getitem__ return one example. The size "
            "of a step is privacy.expected_batch_size."
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


def private_loader(loader: DataLoader[Any], private: PrivateStep) -> DataLoader[Any]:
    """The user's loader with Poisson sampling instead of its sampler and batch size."""
    reads: DataLoader[Any] = DataLoader(
        private.reader,
        batch_sampler=EpochBatches(private),
        num_workers=loader.num_workers,
        collate_fn=_single,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=WorkerSeeding(private.seed, private.ranks.rank, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    # Lightning gives every loader of a distributed run a sampler of its own, except where it finds this one. What is
    # read comes from the batch sampler.
    ranks = private.ranks
    dealt: Any = DistributedSampler(private.reader, num_replicas=ranks.size, rank=ranks.rank)
    object.__setattr__(reads, "sampler", dealt)
    return reads


def require_private_loader(trainer: pl.Trainer, private: PrivateStep) -> None:
    """The trainer reads the batches of ``private``.

    Raises:
        ConfigurationError: when it does not.
    """
    loader = trainer.train_dataloader
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(batches, EpochBatches) or batches.private is not private:
        raise ConfigurationError(
            "The training loader's sampler was replaced after PrivacyCallback had set it. Set "
            "trainer.use_distributed_sampler: false and remove callbacks that replace loaders."
        )


def warn_of_equal_views(dataset: Any) -> None:
    """Warn that augmentation multiplicity does nothing for a data set that draws nothing at random."""
    (first, structure), *others = (flatten(dataset[0]) for _ in range(4))
    same = (
        bool(first)
        and all(other == structure for _, other in others)
        and all(
            torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other
            for view, _ in others
            for leaf, other in zip(first, view, strict=True)
        )
    )
    if same:
        rank_zero_warn(
            "privacy.augmult is above 1, but the training set's transform draws nothing at random: all views of an "
            "example are the same, which costs time and changes nothing. Add a random augmentation (data.augment: "
            "true), or remove privacy.augmult."
        )


class PrivateSource(LoaderSource):
    """Takes the place of the Trainer's source of the training loader for one fit, and returns the private one.

    Attributes:
        private: the step that the loader is for; None before ``on_fit_start``.
    """

    def __init__(self, source: LoaderSource) -> None:
        super().__init__(source.instance, source.name)
        self.private: PrivateStep | None = None
        self._num_train: int | None = None

    @classmethod
    def stand_in(cls, trainer: pl.Trainer) -> "PrivateSource":
        """Let the trainer take its loader from a new source of this class."""
        source = cls(loader_source(trainer))
        set_loader_source(trainer, source)
        return source

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "PrivateSource":
        """The one that ``stand_in`` has made.

        Raises:
            ConfigurationError: where other code has exchanged it.
        """
        source = loader_source(trainer)
        if not isinstance(source, cls):
            raise ConfigurationError("The trainer's training loader was replaced between setup and on_fit_start.")
        return source

    @cached_property
    def users(self) -> DataLoader[Any]:
        """The user's loader; it is made once."""
        return original_loader(super().dataloader())

    def num_train(self, settings: PrivacySettings) -> int:
        """N: the examples of the loader's data set, or its persons."""
        if settings.num_train is not None:
            return settings.num_train
        if self._num_train is None:  # counted once, before the data set is closed to the step
            dataset: Any = self.users.dataset
            size = settings.images_per_group
            self._num_train = len(dataset if size is None else Groups(dataset, size))
        return self._num_train

    def dataloader(self) -> Any:
        if self.private is None:
            raise ConfigurationError(
                "The private training loader is asked for before on_fit_start, as by fit_loop.setup_data() in "
                "configure_optimizers. For the number of steps read trainer.estimated_stepping_batches."
            )
        return private_loader(self.users, self.private)


def _single(items: list[Any]) -> Any:
    return items[0]
