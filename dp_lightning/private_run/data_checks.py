"""What is refused of the user's data: loaders that cannot be sampled, and places where training examples would leak.

Hyperparameters go into every checkpoint and to the loggers. The numbers that a validation computes are logged as they
are, and choose checkpoints, learning rates and the end of a run. Training examples in either would lie outside the
guarantee.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import groups_of
from dp_lightning.privacy.records import length_of, shared_places
from dp_lightning.torch_internals import tree_leaves


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


def check_hyperparameters(trainer: pl.Trainer, module: pl.LightningModule, num_elements: int) -> None:
    """Refuse data among the hyperparameters of module and data module.

    Args:
        num_elements: number of elements of the training set; a value with as many entries may hold all of them.

    Raises:
        ConfigurationError: naming the hyperparameter.
    """
    for owner in (module, getattr(trainer, "datamodule", None)):
        if not isinstance(owner, HyperparametersMixin):
            continue
        for name, value in owner.hparams.items():
            if any(_is_data(part, num_elements) for part in (value, *tree_leaves(value))):
                raise ConfigurationError(
                    f"The hyperparameter {name} of {type(owner).__name__} is a {type(value).__name__} that holds data: "
                    "it would go into every checkpoint and to the loggers. Leave it out with "
                    f"save_hyperparameters(ignore=['{name}']), or save a name for it."
                )


def _is_data(value: Any, num_elements: int) -> bool:
    if isinstance(value, Dataset | DataLoader | pl.LightningDataModule):
        return True
    try:
        return not isinstance(value, str) and len(value) >= num_elements
    except TypeError:  # the value has no length
        return False


#: The name under which the statement lists the warning of ``warn_of_shared_persons``: it tells something of raw data.
SHARED_PERSONS = "warning before the first step: persons in training and validation"


def warn_of_shared_persons(trained: Any, loaders: Any) -> bool:
    """Whether data sets of a validation have persons of the training set, with a warning if they have.

    Both have to tell the persons of their images; ``loaders`` are as in ``require_held_out``.
    """
    others = [getattr(loader, "dataset", None) for loader in tree_leaves(loaders)]
    try:
        persons, *held_out = (set(groups_of(dataset) or ()) for dataset in (trained, *others))
    except DataError:  # an attribute ``groups`` that means something else
        return False
    if shared := any(persons & each for each in held_out):
        rank_zero_warn(
            "Some persons of the training set are also in the validation or test images: numbers computed from these "
            "are outside the guarantee, and say less about new persons. Split the data by persons."
        )
    return shared


def require_held_out(trained: Any, loaders: Any) -> None:
    """Refuse a validation on training examples.

    Args:
        trained: the training set.
        loaders: the loaders of the validation, one or a collection; None for no validation.

    Raises:
        ConfigurationError: with the number of training examples among them, and the place of one.
    """
    for loader in tree_leaves(loaders):
        dataset: Any = getattr(loader, "dataset", None)
        size = length_of(dataset)
        if size is None or isinstance(dataset, IterableDataset):
            continue
        drawn = getattr(loader, "sampler", None)
        drawn = drawn.indices if isinstance(drawn, SubsetRandomSampler) else drawn
        places = drawn if isinstance(drawn, Sequence) else range(size)
        if shared := shared_places(dataset, trained, places):
            raise ConfigurationError(
                f"{len(shared)} of the {len(places)} validation examples are training examples, such as the one at "
                f"index {shared[0]} of the validation set: what is computed from them, and every choice by it, would "
                "lie outside the guarantee. Validate on examples that are held out, as a Subset or by their "
                "list as the loader's sampler, or turn validation off by trainer.limit_val_batches: 0. What "
                "training_step logs of training examples is listed in the statement as unprotected."
            )
