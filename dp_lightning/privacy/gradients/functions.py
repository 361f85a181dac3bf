"""Kinds of torch functions, as a function mode sees them."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Functions that read no numbers and are called often: they need no check.
PLAIN = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "stride", "__len__")),
        torch.Tensor.is_floating_point,
        torch.is_floating_point,
    ]
)
DRAWN_IN_PLACE = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
)

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        "setitem", "set", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
)  # fmt: skip
# Their names end like those of functions that write, but they change no numbers.
_HARMLESS = frozenset(["requires_grad_", "share_memory_", "is_shared_", "refine_names_"])


def collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """Append the tensors in nested lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            collect(value, found)
        elif isinstance(value, dict):
            collect(value.values(), found)


def name_of(func: Any) -> str:
    """The name of a function as it is written in Python."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def writes(func: Any) -> bool:
    """Whether a function writes to its first argument, by its name."""
    name = name_of(func)
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS)
