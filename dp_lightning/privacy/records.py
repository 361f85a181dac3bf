"""Which records a data set consists of: one that is in the training set twice would enter a step twice.

A record of the validation set too would be evaluated without noise. A record is a data set and a place in this data
set, and not in a combination of torch or in a data set that transforms another one. No element is read.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from dp_lightning.errors import ConfigurationError


def require_single_records(dataset: Any) -> None:
    """Refuse a training set that has a record more than once.

    Raises:
        ConfigurationError: with the places of one such record.
    """
    places: dict[object, int] = {}
    for place, record in enumerate(records_of(dataset, [])):
        if (first := places.setdefault(record, place)) != place:
            raise ConfigurationError(
                f"Examples {first} and {place} of the training set are the same record, so that it would count twice: "
                "epsilon is about adding or removing one. Take each record once: look at the indices of Subset, and at "
                "ConcatDataset of overlapping or equal parts. To weight examples, weight their loss; for several "
                "transforms of each, set privacy.augmult."
            )


def shared_places(dataset: Any, trained: Any, places: Iterable[int]) -> list[int]:
    """Those places of a data set, such as a validation set, at which it has records of the training set."""
    bases: list[Any] = []
    known, records = set(records_of(trained, bases)), records_of(dataset, bases)
    return [place for place in places if records[place] in known]


def records_of(dataset: Any, bases: list[Any]) -> list[object]:
    """The record of each element: the number of a data set in ``bases``, to which new ones are added, and its place."""
    if isinstance(dataset, Subset):
        inner = records_of(dataset.dataset, bases)
        return [inner[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [record for part in dataset.datasets for record in records_of(part, bases)]
    if isinstance(dataset, StackDataset):
        parts = dataset.datasets
        columns = parts.values() if isinstance(parts, dict) else parts
        return list(zip(*(records_of(column, bases) for column in columns), strict=True))
    held = [value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, Dataset)]
    if len(held) == 1 and length_of(held[0]) == len(dataset):  # as one that adds a transform has it
        return records_of(held[0], bases)
    number = next((number for number, base in enumerate(bases) if _are_same(base, dataset)), len(bases))
    if number == len(bases):
        bases.append(dataset)
    return [(number, place) for place in range(len(dataset))]


def contents(dataset: Any) -> dict[str, Any]:
    """What tells a data set from another one: attributes with an entry for each element, and texts such as ``root``."""
    names = {*getattr(dataset, "__dict__", {}), "labels", "image_files"}  # of this package's data sets
    values = {name: getattr(dataset, name, None) for name in names} | dict(enumerate(getattr(dataset, "tensors", ())))
    size = len(dataset)
    return {str(name): value for name, value in values.items() if _is_text(value) or length_of(value) == size}


def _are_same(one: Any, other: Any) -> bool:
    """Whether two data sets are one object, or of one class, length and content, as `CIFAR10` twice."""
    if one is other or type(one) is not type(other) or len(one) != len(other):
        return one is other
    mine, others = contents(one), contents(other)
    if mine.keys() != others.keys() or all(map(_is_text, mine.values())):
        return False
    return all(_are_equal(mine[name], others[name]) for name in mine)


def _are_equal(one: Any, other: Any) -> bool:
    with suppress(ValueError, RuntimeError):  # of values that no truth value compares
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one, other)
        return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one is other or one == other)
    return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str | PurePath)


def length_of(value: Any) -> int | None:
    """The number of entries of a value; None where it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(value)
    return None
