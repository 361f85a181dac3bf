"""Orthogonalization of each matrix: the DP-Muon and DP-Muon-S updates (Shanmugam et al. 2026).

DP-Muon:    min(cap, sqrt(max(1, m/n))) NS5(M),
DP-Muon-S:  sigma_1(M) min(cap, sqrt(max(1, m/n))) NS5(M),

where M is the m x n input of the transform (a momentum, usually), NS5 five Newton-Schulz steps and sigma_1
the largest singular value. NS5 loses the scale of M; the second form restores it.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import dimension_scale, map_same_shape, polar_factor, spectral_norm
from dp_lightning.postprocess.newton_schulz import Coefficients, check_newton_schulz, newton_schulz
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform, Where


class Orthogonalize(Transform):
    """Replace each matrix by min(scale_cap, sqrt(max(1, m/n))) NS(M). Applies to matrices.

    Args:
        steps: Newton-Schulz steps, at least 1.
        coefficients: "muon", "polar_express" or (a, b, c), see `newton_schulz`; "exact" computes the polar factor by
            a singular value decomposition instead.
        scale_cap: upper bound of the dimension scale, positive. Infinity removes it, as in Muon (Jordan et
            al. 2024).
        precision: of the products. "bfloat16" is faster if the processor supports it, and accurate to 2 %.
    """

    def __init__(
        self,
        *,
        steps: int = 5,
        coefficients: Coefficients | str = "muon",
        scale_cap: float = 4.0,
        precision: Literal["float32", "bfloat16"] = "float32",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to="matrices", **where)
        if coefficients != "exact":
            check_newton_schulz(steps, coefficients)
        if precision not in ("float32", "bfloat16"):
            raise ConfigurationError(f"Orthogonalize: precision must be 'float32' or 'bfloat16', got {precision!r}")
        self.steps = steps
        self.coefficients = coefficients
        self.scale_cap = scale_cap
        self.precision = precision

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        def scaled_factor(batch: Tensor) -> Tensor:
            return dimension_scale(batch.shape[1:], cap=self.scale_cap) * self._factor(batch)

        factors = map_same_shape(scaled_factor, gradients)
        return {name: factors[name].reshape(gradient.shape) for name, gradient in gradients.items()}, {}

    def _factor(self, batch: Tensor) -> Tensor:
        if self.coefficients == "exact":
            return polar_factor(batch)
        dtype = torch.bfloat16 if self.precision == "bfloat16" else None
        return newton_schulz(batch, steps=self.steps, coefficients=self.coefficients, dtype=dtype)


class MagnitudeScale(Transform):
    """sigma_1(M) times another transform of M: keeps the magnitude that an orthogonalization loses.

    `MagnitudeScale(Orthogonalize())` is DP-Muon-S after its momentum. Applies to the matrices that the other transform
    selects.

    Args:
        transform: a transform of matrices; it and sigma_1 receive the same input M.

    Raises:
        ConfigurationError: `transform` also selects parameters that are not matrices.
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__(applies_to="matrices", include=transform.include, exclude=transform.exclude)
        if transform.applies_to != "matrices":
            raise ConfigurationError(
                "MagnitudeScale: transform must apply to 'matrices', because only a matrix has a spectral "
                f"norm; it applies to {transform.applies_to!r}"
            )
        self.transform = transform
        self.has_momentum = transform.has_momentum
        self.has_memory = transform.has_memory
        self.needs_noise = transform.needs_noise

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        output, inner_state = self.transform.update(gradients, state, noise)
        norms = map_same_shape(spectral_norm, gradients)
        return {name: norms[name] * value for name, value in output.items()}, inner_state
