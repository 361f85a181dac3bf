"""Which records a training set consists of: one that is in it twice would enter a step twice.

One that is in the validation set too would be evaluated without noise.

What torch combines data sets with is looked through. A record is a row of a tensor, a file of a folder, or else a place
in a data set; two data sets over the same tensors or files have the same records, and so have two that hold equal
content. A file is one under all of its names, as links give it. What a data set of the user's own does with its index
is known where a few elements show it (``repeats``).
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.repeats import bytes_of, bytes_of_rows, record_numbers


def require_single_records(dataset: Any) -> None:
    """Refuse a training set that has a record more than once.

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
                "set that returns one record for several indices. To weight examples, weight their loss; for "
                "several transforms of each, set privacy.augmult."
            )


def places_of_shared_records(dataset: Any, trained: Any, places: Iterable[int]) -> list[int]:
    """Where a data set has records that a training set has too.

    Args:
        dataset: of a known length, such as a validation set.
        trained: the training set.
        places: those of ``dataset`` that are used.
    """
    same = _same_content([*_parts(dataset), *_parts(trained)])
    known, records = set(_records(trained, same)), _records(dataset, same)
    return [place for place in places if records[place] in known]


def _parts(dataset: Any) -> list[Any]:
    """The data sets that torch's classes and wrappers combine."""
    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return list(chain.from_iterable(map(_parts, dataset.datasets)))
    if isinstance(dataset, StackDataset):
        return list(chain.from_iterable(map(_parts, _stacked(dataset))))
    return [dataset] if (base := _wrapped(dataset)) is None else _parts(base)


def _stacked(dataset: "StackDataset[Any]") -> list[Any]:
    parts = dataset.datasets
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


def _wrapped(dataset: Any) -> Any:
    """The data set of the same length that another one holds, as one that adds a transform does; None for none."""
    held = [value for value in getattr(dataset, "__dict__", {}).values() if isinstance(value, Dataset)]
    with suppress(TypeError):  # without a length
        return held[0] if len(held) == 1 and len(held[0]) == len(dataset) else None  # type: ignore[arg-type]
    return None


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
    if isinstance(dataset, StackDataset):
        return list(zip(*(_records(part, same) for part in _stacked(dataset)), strict=True))
    samples = getattr(dataset, "samples", None)  # of torchvision's folders: a path and a class
    if isinstance(samples, list) and len(samples) == len(dataset) and all(map(_names_a_file, samples)):
        return [_file(str(pair[0]), getattr(dataset, "root", "")) for pair in samples]
    if (paths := getattr(dataset, "image_files", None)) is not None:  # of this package's folders
        return [_file(path) for path in paths]
    if id(dataset) in same:
        names: list[object] = [(same[id(dataset)], index) for index in range(len(dataset))]
    elif isinstance(dataset, TensorDataset) and (filled := [rows for rows in dataset.tensors if _is_filled(rows)]):
        rows = next((rows for rows in filled if rows.stride(0)), filled[0])  # one that is not the same for all
        start, step = rows.data_ptr(), rows.stride(0) * rows.element_size()
        names = [(start + step * row, str(rows.device)) for row in range(len(rows))]
    elif (base := _wrapped(dataset)) is not None:
        names = _records(base, same)
    elif isinstance(samples, list) and len(samples) == len(dataset) and all(map(_is_plain, samples)):
        names = [
            (id(dataset), repr(sample)) if isinstance(sample, tuple) else (id(dataset), index)
            for index, sample in enumerate(samples)
        ]
    else:
        names = [(id(dataset), index) for index in range(len(dataset))]
    return [names[number] for number in record_numbers(dataset)]


def _is_filled(rows: Tensor) -> bool:
    return rows.layout is torch.strided and rows.numel() > 0


def _same_content(parts: Iterable[Any]) -> dict[int, object]:
    """A name for each of those data sets that hold the same rows as another one, by their ids.

    Two objects over one file, such as ``CIFAR10`` twice with other transforms, share no memory. They are known by equal
    arrays of rows, or where they have none, by all their attributes.
    """
    different = list({id(part): part for part in parts}.values())
    lengths = [len(part) for part in different]
    found: dict[str, list[int]] = {}
    for part, length in zip(different, lengths, strict=True):
        if lengths.count(length) > 1:
            for name in _contents(part, length):
                found.setdefault(name, []).append(id(part))
    return {part: name for name, ids in found.items() if len(ids) > 1 for part in ids}


def _contents(part: Any, length: int) -> set[str]:
    """Names of a data set's content, each of which tells it from others."""
    values = {name: value for name, value in getattr(part, "__dict__", {}).items() if "transform" not in name}
    if isinstance(part, TensorDataset):
        values = dict(enumerate(part.tensors))
    rows = {name: hashes for name, value in values.items() if (hashes := _hashes_of_rows(value, length)) is not None}
    wide = {
        _joined(hashes) for name, hashes in rows.items() if _is_wide(values[name]) and 2 * len(set(hashes)) > length
    }
    known = {name: f"function {_code_of(value)}" for name, value in values.items() if callable(value)}
    known |= {name: _joined(hashes) for name, hashes in rows.items()}
    known |= {name: repr(value) for name, value in values.items() if name not in known and _is_plain(value)}
    if wide or not all(name in known for name, value in values.items() if value is not None):
        return wide
    said = [f"{name} {known.get(name)}" for name in values]
    varied = any(2 * len(set(hashes)) > length for hashes in rows.values())
    settings = any(isinstance(value, str | PurePath) for value in values.values())
    return {repr((type(part).__qualname__, *said))} if varied or settings else set()


def _code_of(function: Any) -> int:
    """What functions share that two objects of a class make for themselves; other callables count by their class."""
    itself = function if isinstance(function, type | BuiltinFunctionType) else type(function)
    return id(getattr(function, "__code__", itself))


def _hashes_of_rows(value: Any, length: int) -> list[bytes] | None:
    """Of each entry of a sequence with one for each element; None for anything else."""
    is_array = isinstance(value, np.ndarray | Tensor)
    if not (value.ndim > 0 if is_array else isinstance(value, list | tuple)) or len(value) != length:
        return None
    rows: Iterable[bytes | None] | None = bytes_of_rows(value) if is_array else map(_bytes, value)
    if rows is None:
        return None
    hashes = []
    for said in rows:
        if said is None:
            return None
        hashes.append(hashlib.blake2b(said, digest_size=16).digest())
    return hashes


def _bytes(row: Any) -> bytes | None:
    if isinstance(row, np.ndarray | np.generic | Tensor):
        return bytes_of(row)
    return repr(row).encode() if _is_plain(row) else None


def _joined(hashes: list[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _is_wide(value: Any) -> bool:
    """Whether its rows are arrays, and no labels or ids."""
    if isinstance(value, list | tuple):
        return isinstance(value[0], np.ndarray | Tensor) and value[0].ndim > 0
    return bool(value.ndim > 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | bytes | int | float | PurePath)


def _names_a_file(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) > 0 and isinstance(sample[0], str | PurePath)


def _file(path: str, root: Any = "") -> object:
    """A file's device and number, which all of its links share; its path and its root where there is no such file."""
    if (found := _identity(path)) is not None:
        return found
    root = str(root) if isinstance(root, str | PurePath) else ""
    return _identity(os.path.join(root, path)) or (root, path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
