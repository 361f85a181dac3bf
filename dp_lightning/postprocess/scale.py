"""A constant factor, which gives one kind of parameter a learning rate of its own.

With an optimizer that is linear in the gradient (SGD), parameters scaled by f step with f times the
optimizer's learning rate: f = 0.3 / lr gives them 0.3, under every schedule.
"""

import math
from typing import Unpack

import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import Entry, EntrywiseLinear, Memory
from dp_lightning.postprocess.transform import AppliesTo, Where


class Scale(EntrywiseLinear):
    """Multiply the gradient by a constant.

    Args:
        factor: positive and finite.

    Raises:
        ConfigurationError: `factor` is not positive and finite.
    """

    def __init__(self, factor: float, *, applies_to: AppliesTo = "matrices", **where: Unpack[Where]) -> None:
        super().__init__(applies_to=applies_to, **where)
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigurationError(f"Scale: factor must be positive and finite, got {factor}")
        self.factor = factor

    def step(self, value: Entry, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Entry, Memory]:
        return self.factor * value, Memory()
