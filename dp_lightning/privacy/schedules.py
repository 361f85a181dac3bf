"""Public numbers that change over the steps of a run: the noise multiplier and the clipping norm."""

import math
from dataclasses import dataclass
from typing import Literal

from dp_lightning.errors import ConfigurationError

# A schedule is constant on so many equal parts of a run: an accountant takes time for each noise multiplier.
_PARTS = 8


@dataclass(frozen=True)
class Schedule:
    """How a number changes from its value in the first steps to another one in the last.

    Args:
        shape: ``linear``, ``cosine`` (half a period), or ``exponential`` (equal quotients).
        final: the last value over the first.

    Raises:
        ConfigurationError: a value is outside its range.
    """

    shape: Literal["linear", "cosine", "exponential"]
    final: float

    def __post_init__(self) -> None:
        if self.shape not in ("linear", "cosine", "exponential"):
            raise ConfigurationError(f"A schedule has shape {self.shape!r}; choose linear, cosine or exponential.")
        if not 0.01 <= self.final <= 100:
            raise ConfigurationError(f"final of a schedule must lie between 0.01 and 100; got {self.final}.")

    def factor(self, step: int, num_steps: int) -> float:
        """The value at a step of ``num_steps``, over the first value."""
        progress = min(step * _PARTS // num_steps, _PARTS - 1) / (_PARTS - 1)
        if self.shape == "exponential":
            return float(self.final**progress)
        share = progress if self.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return 1 + (self.final - 1) * share
