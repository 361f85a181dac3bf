"""Warns where persons are not protected, since the guarantee is about an image."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import groups_of


def warn_of_persons(dataset: Any) -> None:
    """Warn if a training set has several images of a person and the unit of privacy is an image."""
    try:
        ids = groups_of(dataset) or []
    except DataError:  # its attribute ``groups`` means something else
        return
    if len(set(ids)) < len(ids):
        rank_zero_warn(
            "The training set tells which images are of one person, and privacy.unit_of_privacy is example: the "
            "guarantee is about one image, and several images of a person together are protected less. Set "
            "privacy.unit_of_privacy: group to protect persons."
        )
