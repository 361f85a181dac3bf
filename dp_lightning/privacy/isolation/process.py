"""Settings of the process that torch, NumPy and Python keep in C, such as the default dtype or the recursion limit.

Those of torch are found by their getters, ``torch.get_default_dtype`` or ``torch._C._is_...``, whatever sets them, and
those of Python and NumPy as pairs of a getter and a setter, such as ``sys.getrecursionlimit``.
"""

import functools
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dp_lightning.torch_internals import core, precision_of

_AUTOCAST = (torch.is_autocast_enabled, torch.get_autocast_dtype)
_PRECISIONS = ("generic.all", *(f"{by}.{of}" for by in ("cuda", "mkldnn") for of in ("all", "conv", "rnn", "matmul")))
_VALUES = (bool, int, float, str, tuple, list, torch.dtype, torch.device, type(None))
# Of the context that a comparison is made in, and of debuggers.
_CONTEXT = ("_are_functorch_transforms_active", "_is_torch_function_mode_enabled", "_get_torch_function_state")
_DEBUGGERS = ("gettrace", "getprofile")
_DENORMAL = 5e-324


def settings() -> dict[str, Any]:
    """All settings by name, to be compared by ``==``."""
    return {name: _read(getter) for name, getter in _getters().items()}


def _read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError as error:  # torch has two ways to set TF32, and one does not tell what the other has set
        return str(error)


@functools.cache
def _getters() -> dict[str, Callable[[], Any]]:
    found = {**dict(_of_torch()), **dict(_pairs())}
    found |= {"os.getcwd": os.getcwd, "torch.set_flush_denormal": _flushes_denormals}
    found |= {f"fp32_precision of {name}": functools.partial(precision_of, *name.split(".")) for name in _PRECISIONS}
    for device in ("cpu", "cuda"):
        found |= {f"torch.{read.__name__}({device!r})": functools.partial(read, device) for read in _AUTOCAST}
    return found


def _of_torch() -> Iterator[tuple[str, Callable[[], Any]]]:
    seen = set()
    for module in (torch, core):
        for name in dir(module):
            getter = getattr(module, name)
            is_new = re.match("_?(get|is|are)_", name) and name not in _CONTEXT and getter not in seen
            if is_new and _answers(getter):
                seen.add(getter)
                yield f"{module.__name__}.{name}", getter


def _pairs() -> Iterator[tuple[str, Callable[[], Any]]]:
    for module, pattern in {sys: "get", gc: "get_", np: "get"}.items():
        for name in dir(module):
            match = re.match(pattern, name)
            setter = f"set{name[match.end() - pattern.endswith('_') :]}" if match else ""
            if match and name not in _DEBUGGERS and hasattr(module, setter) and _answers(getattr(module, name), dict):
                yield f"{module.__name__}.{name}", getattr(module, name)


def _answers(getter: Callable[[], Any], *more: type) -> bool:
    """Whether a getter needs no argument, is not deprecated, and returns a plain value or a name of an enumeration."""
    with warnings.catch_warnings(action="error"):
        try:
            value = getter()
        except Exception:
            return False
    return isinstance(value, (*_VALUES, *more)) or hasattr(type(value), "__members__")


def _flushes_denormals() -> bool:
    return _DENORMAL * 1.0 == 0.0
