"""Which records a training set consists of: one that stands in it twice would enter a step twice.

What torch combines data sets with is looked through. A record is a row of a tensor, a file of a folder, or else a place
in a data set; two data sets over the same tensors or files have the same records, and so have two that hold equal
content. A file is one under all of its names, as links give it. What a data set of the user's own does with its index
is known where a few elements show it (``repeats``).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.repeats import record_numbers


def require_single_records(dataset: Any) -> None:
    """Refuse a training set with a record that stands in it more than once.

    Raises:
        ConfigurationError: with the places of one of them.
    """
    places: dict[object, int] = {}
    for place, record in enumerate(_records(dataset, _same_content(_parts(dataset)))):
        if (first := places.setdefault(record, place)) != place:
            raise ConfigurationError(
                f"Examples {first} and {place} of the training set are the same record, so that it would count twice: "
                "epsilon is about adding or removing one. Take each record once: look at the indices of Subset, at "
                "ConcatDataset of overlapping or equal parts, at files that are listed or linked twice, and at a data "
                "set that hands out one record under several indices. To weight examples, weight their loss; for "
                "several transforms of each, set privacy.augmult."
            )


def _parts(dataset: Any) -> list[Any]:
    """The data sets that torch's classes combine."""
    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return list(chain.from_iterable(map(_parts, dataset.datasets)))
    return [dataset]


def _records(dataset: Any, same: dict[int, object]) -> list[object]:
    """A name of each element's record.

    Args:
        same: a name for the content of some data sets, by their ids.
    """
    if isinstance(dataset, Subset):
        inner = _records(dataset.dataset, same)
        return [inner[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return list(chain.from_iterable(_records(part, same) for part in dataset.datasets))
    if id(dataset) in same:
        return [(same[id(dataset)], number) for number in record_numbers(dataset)]
    if isinstance(dataset, TensorDataset) and (filled := [rows for rows in dataset.tensors if rows.numel()]):
        rows = next((rows for rows in filled if rows.stride(0)), filled[0])  # one that is not the same for all
        start, step = rows.data_ptr(), rows.stride(0) * rows.element_size()
        return [(start + step * row, str(rows.device)) for row in range(len(rows))]
    samples = getattr(dataset, "samples", None)  # of torchvision's folders: a path and a class
    if isinstance(samples, list) and len(samples) == len(dataset) and all(isinstance(pair, tuple) for pair in samples):
        return [_file(str(pair[0])) for pair in samples]
    if (paths := getattr(dataset, "image_files", None)) is not None:  # of this package's folders
        return [_file(path) for path in paths]
    return [(id(dataset), number) for number in record_numbers(dataset)]


def _same_content(parts: Iterable[Any]) -> dict[int, object]:
    """A name for each of those data sets that hold the same rows as another one, by their ids.

    Two objects over one file, such as ``CIFAR10`` twice with other transforms, share no memory. They are known by an
    attribute with an entry for each element, most of them different.
    """
    different = list({id(part): part for part in parts}.values())
    lengths = [len(part) for part in different]
    found: dict[str, list[int]] = {}
    for part, length in zip(different, lengths, strict=True):
        if lengths.count(length) > 1:
            for name in {_content(rows) for rows in _rows_of(part, length)} - {None}:
                found.setdefault(str(name), []).append(id(part))
    return {part: name for name, ids in found.items() if len(ids) > 1 for part in ids}


def _rows_of(dataset: Any, length: int) -> Iterator[Any]:
    values = dataset.tensors if isinstance(dataset, TensorDataset) else vars(dataset).values()
    for value in values if hasattr(dataset, "__dict__") else ():
        is_rows = isinstance(value, list | tuple) or (isinstance(value, np.ndarray | Tensor) and value.ndim > 0)
        if is_rows and len(value) == length:
            yield value


def _content(rows: Any) -> str | None:
    """A hash of all rows; None where they are of another kind, or too often equal to tell data sets apart."""
    hashes = []
    for row in rows:
        if isinstance(row, Tensor):
            row = row.numpy(force=True)
        if isinstance(row, np.ndarray | np.generic) and not row.dtype.hasobject:
            said = f"{row.dtype} {row.shape}".encode() + row.tobytes()
        elif _is_plain(row):
            said = repr(row).encode()
        else:
            return None
        hashes.append(hashlib.blake2b(said, digest_size=16).digest())
    return hashlib.sha256(b"".join(hashes)).hexdigest() if len(set(hashes)) > len(hashes) / 2 else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | bytes | int | float | PurePath)


def _file(path: str) -> object:
    """A file's device and number, which all of its links share; its path where there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return status.st_dev, status.st_ino
