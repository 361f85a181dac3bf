"""Warns where persons are not protected: where the guarantee is about an image, and in the images of evaluations."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.datamodules.base import ImageDataModule
from dp_lightning.datamodules.features import CachedFeatures
from dp_lightning.datamodules.persons import warn_of_shared_persons
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group, groups_of
from dp_lightning.torch_internals import tree_leaves


def warn_of_persons(dataset: Any) -> None:
    """Warn if a training set has several images of a person and the unit of privacy is an image."""
    ids = _told(dataset)
    if len(set(ids)) < len(ids):
        rank_zero_warn(
            "The training set tells which images are of one person, and privacy.unit_of_privacy is example: the "
            "guarantee is about one image, and several images of a person together are protected less. Set "
            "privacy.unit_of_privacy: group to protect persons."
        )


def warn_of_evaluated_persons(trained: Sequence[Group], trainer: pl.Trainer, split: Literal["val", "test"]) -> None:
    """Say that persons of the training set are evaluated too. The data modules of dp_lightning say it themselves.

    Args:
        trained: ids of the persons in the training set.
        trainer: about to evaluate.
        split: which loaders it has.
    """
    if isinstance(trainer.datamodule, ImageDataModule | CachedFeatures):  # type: ignore[attr-defined]
        return
    for loader in tree_leaves(getattr(trainer, f"{split}_dataloaders")):
        warn_of_shared_persons(trained, _told(getattr(loader, "dataset", None)), split)


def _told(dataset: Any) -> list[Group]:
    """Ids that a data set tells; an attribute ``groups`` that means something else is none."""
    try:
        return groups_of(dataset) or []
    except DataError:
        return []
