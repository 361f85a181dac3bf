"""Refuses numbers that no setting can have, before anything is built from them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jsonargparse import Namespace

from dp_lightning.errors import ConfigurationError

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_INTEGER = 2**63


def require_plausible(settings: Namespace) -> None:
    """Check every number in a configuration.

    Raises:
        ConfigurationError: naming a setting that is not finite, or outside the range of float32 or 64-bit integers.
    """
    for name, number in _numbers(settings, ""):
        if isinstance(number, int):
            if abs(number) >= _LARGEST_INTEGER:
                digits = len(str(abs(number) // 10)) + 1 if abs(number) < 10**1000 else "more than 1,000"
                raise ConfigurationError(f"{name} has {digits} digits; integers must be below 2**63.")
        elif not math.isfinite(number):
            raise ConfigurationError(f"{name} is {number}; settings are finite numbers.")
        elif abs(number) > _LARGEST:
            raise ConfigurationError(f"{name} is {number:g}, outside the range of float32, in which training computes.")


def _numbers(settings: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Every number with its dotted name."""
    if isinstance(settings, int | float) and not isinstance(settings, bool):
        yield name, settings
    elif isinstance(settings, Namespace | Mapping):
        items = vars(settings) if isinstance(settings, Namespace) else settings
        for key, value in items.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list | tuple):
        for place, value in enumerate(settings):
            yield from _numbers(value, f"{name}[{place}]")
