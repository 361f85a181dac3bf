"""Whether a data set of the user's own returns one record for several indices, as ``base[index % len(base)]`` does.

A few elements are read, each with the same random numbers, and compared at the distances at which such data sets
repeat: the lengths of what they hold, a simple part of their own length, and neighbours. They are equal where all their
parts are, but for a number that is the index itself. A data set that repeats in another way is not known.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_lightning.torch_internals import tree_leaves

# How many times a record may stand there.
_TIMES = range(2, 17)
_ROWS = 4096  # read at a time


def record_numbers(dataset: Any) -> list[int]:
    """For each index a number that stands for its record: the index itself where no repeat is known."""
    size = len(dataset)
    content = functools.cache(functools.partial(_content, dataset))
    for distance in sorted(_lengths(dataset) | {size // times for times in _TIMES if size % times == 0}):
        firsts = _spread(min(distance, size - distance))
        if _are_repeats([(first, first + distance) for first in firsts], content):
            return [index % distance for index in range(size)]
    for times in reversed(_TIMES):  # a row that stands there four times stands there twice, too
        firsts = [times * number for number in _spread(size // times)]
        if all(_are_repeats([(first, first + step) for first in firsts], content) for step in (1, times - 1)):
            return [index // times for index in range(size)]
    return list(range(size))


def _lengths(dataset: Any) -> set[int]:
    """Of what a data set holds."""
    found = set()
    for value in getattr(dataset, "__dict__", {}).values():
        with suppress(Exception):  # a scalar has none, and an object of the user's may raise anything
            found.add(len(value))
    return found


def _spread(count: int) -> list[int]:
    """Three places among so many: the first ones may all be blank."""
    return [0, count // 2, count - 1] if count >= 3 else []


def _are_repeats(pairs: list[tuple[int, int]], content: Callable[[int], "_Content | None"]) -> bool:
    """Whether each pair is of one record, and no two pairs of the same."""
    if not pairs or not all(_are_equal(content(one), content(other)) for one, other in pairs):
        return False
    return not any(_are_equal(content(one), content(other)) for (one, _), (other, _) in combinations(pairs, 2))


_Content = list[tuple[str, bool]]
"""For each part of an element a hash, and whether it is the index."""


def _are_equal(one: _Content | None, other: _Content | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(mine == yours or (is_mine and is_yours) for (mine, is_mine), (yours, is_yours) in pairs)


def _content(dataset: Any, index: int) -> _Content | None:
    """Of an element; None where it cannot be read, or a part of it is of another kind."""
    found: _Content = []
    try:
        with same_numbers():
            leaves = tree_leaves(dataset[index])
        for leaf in leaves:
            array = leaf if isinstance(leaf, Tensor) else np.asarray(leaf)
            if (said := bytes_of(array)) is None:
                return None
            found.append((hashlib.sha256(said).hexdigest(), array.ndim == 0 and bool(leaf == index)))
    except Exception:  # of the user's code, which says so where the element is used
        return None
    return found


def bytes_of(array: Any) -> bytes | None:
    """What a tensor or an array of NumPy holds, with its dtype and shape; None where it is not in memory like that."""
    return _head(array, array.shape) + _content_of(array) if _is_in_memory(array) else None


def bytes_of_rows(array: Any) -> Iterator[bytes] | None:
    """What ``bytes_of`` gives for each entry of a tensor or an array, in a tenth of the time."""
    if not _is_in_memory(array):
        return None
    if isinstance(array, np.ndarray) and array.dtype.kind in "SU":  # a word by itself has a dtype of its own length
        return filter(None, map(bytes_of, array))
    return _rows(array)


def _rows(array: Any) -> Iterator[bytes]:
    head = _head(array, array.shape[1:])
    for start in range(0, len(array), _ROWS):
        part = array[start : start + _ROWS]
        content = _content_of(part)
        size = len(content) // len(part)
        yield from (head + content[size * row : size * (row + 1)] for row in range(len(part)))


def _is_in_memory(array: Any) -> bool:
    return array.layout is torch.strided if isinstance(array, Tensor) else not array.dtype.hasobject


def _head(array: Any, shape: Iterable[int]) -> bytes:
    return f"{array.dtype} {tuple(shape)}".encode()


def _content_of(array: Any) -> bytes:
    if isinstance(array, Tensor):
        array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content: bytes = array.tobytes()
    return content


@contextmanager
def same_numbers() -> Iterator[None]:
    """The global generators say the same each time, and continue afterwards as if nothing had happened."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
