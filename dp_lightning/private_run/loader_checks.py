"""What is refused of the user's training loader."""

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dp_lightning.errors import ConfigurationError


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
    if type(loader.batch_sampler) is not BatchSampler or not _is_ordinary(loader):
        raise ConfigurationError(
            f"train_dataloader has batch_size=None or a sampler of its own ({type(loader.sampler).__name__} in "
            f"{type(loader.batch_sampler).__name__}), and Poisson sampling replaces an ordinary order alone. Remove "
            "it, and set a batch_size, such as 1; for a subset of the data use torch.utils.data.Subset."
        )
    return loader


def _is_ordinary(loader: DataLoader[Any]) -> bool:
    """Whether a loader takes each element once; Lightning gives that of several ranks a sampler around the user's."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.dataset is loader.dataset
    return isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
