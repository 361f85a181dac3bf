"""Settings of the process that torch, NumPy and Python keep in C, such as the default dtype or the recursion limit.

They are found as pairs of a getter and a setter: ``torch.get_default_dtype`` and ``torch.set_default_dtype``,
``sys.getrecursionlimit`` and ``sys.setrecursionlimit``.
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

from dp_lightning.torch_internals import core

_AUTOCAST = (torch.is_autocast_enabled, torch.get_autocast_dtype)
_VALUES = (bool, int, float, str, tuple, list, dict, torch.dtype, torch.device)


def settings() -> dict[str, Any]:
    """All settings by name, to be compared by ``==``."""
    return {name: read() for name, read in _getters().items()}


@functools.cache
def _getters() -> dict[str, Callable[[], Any]]:
    found = dict(_pairs())
    found["os.getcwd"] = os.getcwd
    for device in ("cpu", "cuda"):
        found |= {f"torch.{read.__name__}({device!r})": functools.partial(read, device) for read in _AUTOCAST}
    return found


def _pairs() -> Iterator[tuple[str, Callable[[], Any]]]:
    patterns = {torch: "()(get_|is_)", core: "(_)(get_|is_)", sys: "()(get)", gc: "()(get_)", np: "()(get)"}
    for module, pattern in patterns.items():
        for name in dir(module):
            match = re.match(pattern, name)
            if match and hasattr(module, f"{match[1]}set{name[match.end() - match[2].endswith('_') :]}"):
                getter = getattr(module, name)
                if _answers(getter):
                    yield f"{module.__name__}.{name}", getter


def _answers(getter: Callable[[], Any]) -> bool:
    """Whether a getter needs no argument, is not deprecated, and returns a plain value."""
    with warnings.catch_warnings(action="error"):
        try:
            return isinstance(getter(), _VALUES)
        except Exception:
            return False
