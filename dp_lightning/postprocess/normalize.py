"""Updates of a fixed size: what a fixed norm does by itself, without orthogonalization.

An orthogonalized m x n matrix has the Frobenius norm min(cap, sqrt(max(1, m/n))) sqrt(min(m, n)), whatever the gradient
is. These two give a matrix that norm and leave its direction alone: `Normalize` by its own norm, and `NoiseNormalize`
by the norm of the noise in it, noise * sqrt(m n), which is known without looking at the gradient.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.linear import LinearTransform, Slots
from dp_lightning.postprocess.matrix import at_least_float32, dimension_scale, nonzero, unit_range
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform, Where


class Normalize(Transform):
    """Give each matrix a Frobenius norm. Applies to matrices.

    Args:
        norm: positive; None is that of an orthogonalized matrix of the same shape.
        scale_cap: upper bound of the dimension scale where `norm` is None.
        where: see `Transform`.

    Raises:
        ConfigurationError: a setting outside its range.
    """

    def __init__(self, *, norm: float | None = None, scale_cap: float = 4.0, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        _check("Normalize", norm, scale_cap)
        self.norm = norm
        self.scale_cap = scale_cap

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        output = {}
        for name, gradient in gradients.items():
            whole = unit_range(at_least_float32(gradient).flatten()[None])
            direction = whole / nonzero(torch.linalg.vector_norm(whole))
            scaled = _norm(self.norm, gradient.shape, self.scale_cap) * direction
            output[name] = scaled.reshape(gradient.shape).to(gradient.dtype)
        return output, {}


class NoiseNormalize(LinearTransform):
    """Divide each matrix by the Frobenius norm of its noise, times `norm`. Applies to matrices.

    A step then has the same size in units of the noise whatever the batch size, the noise multiplier and the momentum
    before it are. It is linear: directions and the ratio of signal to noise stay as they are.

    Args:
        norm: what the noise alone has then, positive; None is the norm of an orthogonalized matrix of the same shape.
        scale_cap: upper bound of the dimension scale where `norm` is None.
        where: see `Transform`.

    Raises:
        ConfigurationError: a setting outside its range, or, at the first step, a run without noise.
    """

    needs_noise = True

    def __init__(self, *, norm: float | None = None, scale_cap: float = 4.0, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        _check("NoiseNormalize", norm, scale_cap)
        self.norm = norm
        self.scale_cap = scale_cap

    def step(self, value: Tensor, slots: Slots, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Slots]:
        if not noise:
            raise ConfigurationError(
                "NoiseNormalize divides by the norm of the noise, and there is none or it is not known. Train with "
                "PrivacyCallback and noise, or take Normalize"
            )
        return _norm(self.norm, shape, self.scale_cap) / (noise * math.sqrt(shape.numel())) * value, {}


def _check(title: str, norm: float | None, scale_cap: float) -> None:
    if norm is not None and not (norm > 0 and math.isfinite(norm)):
        raise ConfigurationError(f"{title}: norm must be positive and finite, got {norm}")
    if not scale_cap > 0:
        raise ConfigurationError(f"{title}: scale_cap must be positive, got {scale_cap}")


def _norm(norm: float | None, shape: torch.Size, cap: float) -> float:
    if norm is not None:
        return norm
    return dimension_scale(shape, cap=cap) * math.sqrt(min(shape[0], shape[1:].numel()))
