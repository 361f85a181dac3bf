"""Whether a data set of the user's own hands out one record under several indices, as ``base[index % len(base)]`` does.

A few elements are read, each with the same random numbers, and compared at the distances at which such data sets
repeat: the lengths of what they hold, a simple part of their own length, and neighbours. A data set that repeats in
another way is not known.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# How many times a record may stand there.
_TIMES = range(2, 9)
# So many pairs are compared, and hold as many records.
_PAIRS = 3


def record_numbers(dataset: Any) -> list[int]:
    """For each index a number that stands for its record: the index itself where no repeat is known."""
    size = len(dataset)
    content = functools.cache(functools.partial(_content, dataset))
    for distance in sorted(_lengths(dataset) | {size // times for times in _TIMES if size % times == 0}):
        pairs = [(index, index + distance) for index in range(_PAIRS)]
        if _PAIRS <= distance <= size - _PAIRS and _are_repeats(pairs, content):
            return [index % distance for index in range(size)]
    for times in _TIMES:
        pairs = [(times * index, times * index + 1) for index in range(_PAIRS)]
        if times * _PAIRS <= size and _are_repeats(pairs, content):
            return [index // times for index in range(size)]
    return list(range(size))


def _lengths(dataset: Any) -> set[int]:
    """Of what a data set holds."""
    found = set()
    for value in getattr(dataset, "__dict__", {}).values():
        with suppress(Exception):  # a scalar has none, and an object of the user's may raise anything
            found.add(len(value))
    return found


def _are_repeats(pairs: list[tuple[int, int]], content: Callable[[int], str | None]) -> bool:
    """Whether each pair is of one record, and no two pairs of the same."""
    equal = all(content(one) is not None and content(one) == content(other) for one, other in pairs)
    return equal and len({content(one) for one, _ in pairs}) == len(pairs)


def _content(dataset: Any, index: int) -> str | None:
    """A hash of the largest part of an element; None where it cannot be read, or is of another kind."""
    try:
        with _same_numbers():
            leaves = [np.asarray(_on_host(leaf)) for leaf in tree_leaves(dataset[index])]
    except Exception:  # of the user's code, which says so where the element is used
        return None
    arrays = [array for array in leaves if not array.dtype.hasobject]
    if not arrays:
        return None
    largest = max(arrays, key=lambda array: array.nbytes)
    return hashlib.sha256(f"{largest.dtype} {largest.shape}".encode() + largest.tobytes()).hexdigest()


def _on_host(leaf: Any) -> Any:
    return leaf.numpy(force=True) if isinstance(leaf, Tensor) else leaf


@contextmanager
def _same_numbers() -> Iterator[None]:
    """The global generators say the same each time, and go on afterwards as if nothing had been."""
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
