"""A constant factor, which gives one kind of parameter a learning rate of its own.

With an optimizer that is linear in the gradient (SGD), parameters scaled by f step with f times the
optimizer's learning rate: f = 0.3 / lr gives them 0.3, under every schedule.
"""

import math

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.transform import AppliesTo, Gradients, State, Transform


class Scale(Transform):
    """Multiply the gradient by a constant.

    Args:
        factor: positive and finite.
        applies_to: see `Transform`.

    Raises:
        ConfigurationError: `factor` is not positive and finite.
    """

    def __init__(self, factor: float, *, applies_to: AppliesTo = "matrices") -> None:
        super().__init__(applies_to=applies_to)
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigurationError(f"Scale: factor must be positive and finite, got {factor}")
        self.factor = factor

    def update(self, gradients: Gradients, state: State) -> tuple[Gradients, State]:
        return {name: self.factor * gradient for name, gradient in gradients.items()}, {}
