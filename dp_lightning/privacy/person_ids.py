"""The ids of persons that a data set tells: text, or whole numbers."""

import math
import unicodedata
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
# Whole numbers above it have no floating-point number of their own.
_EXACT = 2**53


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
        if not told:
            return None
        if len(told) < len(parts):
            raise DataError(
                "A part of the training set's ConcatDataset tells no groups, and another part does. Give each of them "
                "the attribute `groups`."
            )
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
        DataError: naming the first element whose id is missing, of another kind, or unlike the others; or the dtype,
            where it may have rounded ids.
    """
    _require_exact(str(getattr(found, "dtype", "")), where)
    ids = found.tolist() if isinstance(found, Tensor | np.ndarray) else list(found)
    result = [_group(group, f"{where}, element {place}") for place, group in enumerate(ids)]
    if len({type(group) for group in result}) > 1:
        raise DataError(
            f"{where}: some ids are numbers and some are text, so that one person may have two ids (7 and '7'). Write "
            "all of them in one way."
        )
    return result


def _require_exact(dtype: str, where: str) -> None:
    """Refuse floating-point numbers but those of 64 bits: ids that were rounded to them may have become one.

    Raises:
        DataError: beginning with ``where``.
    """
    name = dtype.lower().removeprefix("torch.")
    if "float" in name and name != "float64":
        raise DataError(
            f"{where}: the ids are of {name}, which rounds them, so that two persons may have become one. Make the ids "
            "integers or text where they are first read."
        )


def _group(found: Any, where: str) -> Group:
    """One id.

    Raises:
        DataError: beginning with ``where``.
    """
    if isinstance(found, str):
        group: Group | None = unicodedata.normalize("NFC", found).strip()
    else:
        group = _number(found, where)
    if group is None or str(group).lower() in _MISSING:
        raise DataError(
            f"{where}: the id of the person is missing ({found!r}). All elements without an id would be taken for one "
            "person. Give each element the id of its person, or leave the element out."
        )
    return group


def _number(found: Any, where: str) -> int | None:
    """An id that is no text; None where it is missing.

    Raises:
        DataError: beginning with ``where``.
    """
    _require_exact(str(getattr(found, "dtype", "")), where)
    number = isinstance(found, Real) and not isinstance(found, bool)
    if number and (isinstance(found, Integral) or (float(found).is_integer() and abs(found) < _EXACT)):
        return int(found)
    if found is None or (number and math.isnan(found)):
        return None
    raise DataError(f"{where}: the id is {found!r} ({type(found).__name__}). An id is text or a whole number.")
