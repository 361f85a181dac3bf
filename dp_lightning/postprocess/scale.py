"""Transforms that scale a gradient and keep its direction: by a constant factor, or to an update of a fixed size.

`Scale` gives one kind of parameter a learning rate of its own. With an optimizer that is linear in the gradient (SGD),
parameters scaled by f step with f times the optimizer's learning rate: f = 0.3 / lr gives them 0.3, under every
schedule.

The other two have the effect of a fixed norm alone, without orthogonalization. An orthogonalized m x n matrix has the
Frobenius norm min(cap, sqrt(max(1, m/n))) sqrt(min(m, n)), whatever the gradient is. `Normalize` divides a matrix by
its own norm, and `NoiseNormalize` by the norm of the noise in it, noise * sqrt(m n), which is known without looking at
the gradient.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear, Memory
from dp_lightning.postprocess.matrix import at_least_float32, dimension_scale, nonzero, unit_range
from dp_lightning.postprocess.transform import AppliesTo, Gradients, Noise, State, Transform, Where


class Scale(EntrywiseLinear):
    """Multiply the gradient by a constant.

    Args:
        factor: positive and finite.
    """

    def __init__(self, factor: float, *, applies_to: AppliesTo = "matrices", **where: Unpack[Where]) -> None:
        super().__init__(applies_to=applies_to, **where)
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigurationError(f"Scale: factor must be positive and finite, got {factor}")
        self.factor = factor

    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        return self.factor * value, Memory()


class _OfNorm(Transform):
    """Base of `Normalize` and `NoiseNormalize`, with the settings that they share.

    Args:
        norm: positive; None is that of an orthogonalized matrix of the same shape.
        scale_cap: upper bound of the dimension scale if `norm` is None.
    """

    def __init__(self, *, norm: float | None = None, scale_cap: float = 4.0, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise ConfigurationError(f"{type(self).__name__}: norm must be positive and finite, got {norm}")
        self.norm, self.scale_cap = norm, scale_cap

    def norm_of(self, shape: torch.Size) -> float:
        """The norm of a parameter of this shape."""
        if self.norm is not None:
            return self.norm
        return dimension_scale(shape, cap=self.scale_cap) * math.sqrt(min(shape[0], shape[1:].numel()))


class Normalize(_OfNorm):
    """Give each matrix the Frobenius norm `norm`, or that of an orthogonalized matrix of its shape."""

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        output = {}
        for name, gradient in gradients.items():
            whole = unit_range(at_least_float32(gradient).flatten()[None])
            direction = whole / nonzero(torch.linalg.vector_norm(whole))
            output[name] = (self.norm_of(gradient.shape) * direction).reshape(gradient.shape).to(gradient.dtype)
        return output, {}


class NoiseNormalize(_OfNorm, EntrywiseLinear):
    """Scale each matrix so that its noise has the Frobenius norm `norm`, or that of an orthogonalized matrix.

    A step then has the same size in units of the noise, whatever the batch size, the noise multiplier and the momentum
    before it. It is linear: directions and the ratio of signal to noise do not change.

    Raises:
        ConfigurationError: at the first step, a run without noise.
    """

    needs_noise = True

    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        if not noise:
            raise ConfigurationError(
                "NoiseNormalize divides by the norm of the noise, but there is none or it is not known. Train with "
                "PrivacyCallback and noise, or use Normalize"
            )
        return self.norm_of(shape) / (noise * math.sqrt(shape.numel())) * value, Memory()
