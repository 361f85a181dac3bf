"""Updates of a fixed size: the effect of a fixed norm alone, without orthogonalization.

An orthogonalized m x n matrix has the Frobenius norm min(cap, sqrt(max(1, m/n))) sqrt(min(m, n)), whatever the gradient
is. These two scale a matrix by that norm and keep its direction: `Normalize` divides it by its own norm, and
`NoiseNormalize` by the norm of the noise in it, noise * sqrt(m n), which is known without looking at the gradient.
"""

import math
from typing import Unpack

import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import Entry, EntrywiseLinear, Memory
from dp_lightning.postprocess.matrix import at_least_float32, dimension_scale, nonzero, unit_range
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform, Where


class _OfNorm(Transform):
    """Base of both transforms, with the settings that they share.

    Args:
        norm: positive; None is that of an orthogonalized matrix of the same shape.
        scale_cap: upper bound of the dimension scale if `norm` is None.

    Raises:
        ConfigurationError: a setting outside its range.
    """

    def __init__(self, *, norm: float | None = None, scale_cap: float = 4.0, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise ConfigurationError(f"{type(self).__name__}: norm must be positive and finite, got {norm}")
        if not scale_cap > 0:
            raise ConfigurationError(f"{type(self).__name__}: scale_cap must be positive, got {scale_cap}")
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
        ConfigurationError: a setting outside its range, or, at the first step, a run without noise.
    """

    needs_noise = True

    def step(self, value: Entry, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Entry, Memory]:
        if not noise:
            raise ConfigurationError(
                "NoiseNormalize divides by the norm of the noise, but there is none or it is not known. Train with "
                "PrivacyCallback and noise, or use Normalize"
            )
        return self.norm_of(shape) / (noise * math.sqrt(shape.numel())) * value, Memory()
