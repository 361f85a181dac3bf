"""The ids of persons that a data set tells: text, or whole numbers."""

import unicodedata
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from dp_lightning.errors import DataError

Group = int | str
"""The id of a person."""

# What tables write where they have no value, without capitals.
_MISSING = {"", "nan", "none", "null", "na", "n/a", "<na>", "-1"}
# Whole numbers above it have no float32 of their own: ids that were rounded may be those of several persons.
_EXACT = 2**24


def groups_of(dataset: Any) -> list[Group] | None:
    """The id of the person of each element; None where the data set tells none.

    Raises:
        DataError: where ids are missing, of other kinds than text and whole numbers, or too few or many.
    """
    if isinstance(dataset, Subset):
        inner = groups_of(dataset.dataset)
        return None if inner is None else [inner[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [groups_of(part) for part in dataset.datasets]
        told = [part for part in parts if part is not None]
        if len(told) < len(parts):
            return None
        return checked_groups([group for part in told for group in part], "groups of the ConcatDataset")
    found = getattr(dataset, "groups", None)
    if found is None:
        return None
    where = f"groups of {type(dataset).__name__}"
    if not isinstance(found, Iterable):
        raise DataError(f"{where} is not a sequence: make it an attribute or a property with one id per element.")
    ids = checked_groups(found, where)
    if len(ids) != len(dataset):
        raise DataError(f"{where} has {len(ids)} ids for {len(dataset)} elements; it needs one for each.")
    return ids


def checked_groups(found: Iterable[Any], where: str) -> list[Group]:
    """Ids as text, in Unicode's form NFC and without spaces around it, or as whole numbers.

    Args:
        found: a sequence, an array or a tensor, with one id per element.
        where: begins the message of an error.

    Raises:
        DataError: naming the first element whose id is missing, of another kind, or unlike the others.
    """
    ids = found.tolist() if isinstance(found, Tensor | np.ndarray) else list(found)
    result = [checked_group(group, f"{where}, element {place}") for place, group in enumerate(ids)]
    if len({type(group) for group in result}) > 1:
        raise DataError(
            f"{where}: some ids are numbers and some are text, so that one person may have two ids (7 and '7'). Write "
            "all of them in one way."
        )
    return result


def checked_group(found: Any, where: str) -> Group:
    """One id, as in ``checked_groups``.

    Raises:
        DataError: beginning with ``where``.
    """
    group: Any = found
    if isinstance(found, str):
        group = unicodedata.normalize("NFC", found).strip()
    elif isinstance(found, Integral) or (isinstance(found, Real) and found % 1 == 0 and abs(float(found)) < _EXACT):
        group = int(group)
    if str(group).lower() in _MISSING:
        raise DataError(
            f"{where}: the id of the person is missing ({found!r}). All elements without an id would be taken for one "
            "person. Give each element the id of its person, or leave the element out."
        )
    if isinstance(found, bool) or not isinstance(group, int | str):
        raise DataError(
            f"{where}: the id is {found!r} ({type(found).__name__}). An id is text or a whole number; make numbers "
            f"from {_EXACT} on integers or text where they are first read, since floating-point numbers round them."
        )
    return group


def warn_of_persons(dataset: Any) -> None:
    """Warn if a data set, each of whose images is an example of its own, has several images of a person."""
    try:
        ids = groups_of(dataset) or []
    except DataError:  # its attribute ``groups`` means something else
        return
    if len(set(ids)) < len(ids):
        warnings.warn(
            "The training set tells which images are of one person, and privacy.unit_of_privacy is example: the "
            "guarantee is about one image, and several images of a person together are protected less. Set "
            "privacy.unit_of_privacy: group to protect persons.",
            stacklevel=2,
        )
