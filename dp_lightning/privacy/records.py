"""Which records a training set consists of: one that stands in it twice would enter a step twice.

What torch combines data sets with is looked through. A record is a row of a tensor, a file of a folder, or else a place
in a data set; two data sets over the same tensors or files have the same records. A file is one under all of its names,
as links give it. What a data set of the user's own does with its index is not known.
"""

import os
from itertools import chain
from typing import Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dp_lightning.errors import ConfigurationError


def require_single_records(dataset: Any) -> None:
    """Refuse a training set with a record that stands in it more than once.

    Raises:
        ConfigurationError: with the places of one of them.
    """
    places: dict[object, int] = {}
    for place, record in enumerate(_records(dataset)):
        if (first := places.setdefault(record, place)) != place:
            raise ConfigurationError(
                f"Examples {first} and {place} of the training set are the same record, so that it would count twice: "
                "epsilon is about adding or removing one. Take each record once: look at the indices of Subset, at "
                "ConcatDataset of overlapping parts, and at files that are listed or linked twice. To weight "
                "examples, weight their loss."
            )


def _records(dataset: Any) -> list[object]:
    """A name of each element's record."""
    if isinstance(dataset, Subset):
        inner = _records(dataset.dataset)
        return [inner[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return list(chain.from_iterable(map(_records, dataset.datasets)))
    if isinstance(dataset, TensorDataset) and (filled := [rows for rows in dataset.tensors if rows.numel()]):
        rows = next((rows for rows in filled if rows.stride(0)), filled[0])  # one that is not the same for all
        start, step = rows.data_ptr(), rows.stride(0) * rows.element_size()
        return [(start + step * row, str(rows.device)) for row in range(len(rows))]
    samples = getattr(dataset, "samples", None)  # of torchvision's folders: a path and a class
    if isinstance(samples, list) and len(samples) == len(dataset) and all(isinstance(pair, tuple) for pair in samples):
        return [_file(str(pair[0])) for pair in samples]
    if (paths := getattr(dataset, "image_files", None)) is not None:  # of this package's folders
        return [_file(path) for path in paths]
    return [(id(dataset), index) for index in range(len(dataset))]


def _file(path: str) -> object:
    """A file's device and number, which all of its links share; its path where there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return status.st_dev, status.st_ino
