"""Orthogonalization of each matrix: the DP-Muon and DP-Muon-S updates (Shanmugam et al. 2026).

DP-Muon:    min(cap, sqrt(max(1, m/n))) NS5(M),
DP-Muon-S:  sigma_1(M) min(cap, sqrt(max(1, m/n))) NS5(M),

where M is the m x n input of the transform (a momentum, usually), NS5 five Newton-Schulz steps and sigma_1
the largest singular value. NS5 forgets the scale of M; the second form puts it back.
"""

import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import (
    Coefficients,
    check_newton_schulz,
    dimension_scale,
    map_same_shape,
    newton_schulz,
    spectral_norm,
)
from dp_lightning.postprocess.transform import Gradients, State, Transform


class Orthogonalize(Transform):
    """Replace each matrix by min(scale_cap, sqrt(max(1, m/n))) NS(M). Applies to matrices.

    Args:
        steps: Newton-Schulz steps, at least 1.
        coefficients: see `newton_schulz`.
        scale_cap: upper bound of the dimension scale, positive. Infinity removes it, as in Muon (Jordan et
            al. 2024).

    Raises:
        ConfigurationError: a setting outside its range.
    """

    def __init__(self, *, steps: int = 5, coefficients: Coefficients | str = "muon", scale_cap: float = 4.0) -> None:
        super().__init__(applies_to="matrices")
        check_newton_schulz(steps, coefficients)
        if not scale_cap > 0:
            raise ConfigurationError(f"Orthogonalize: scale_cap must be positive, got {scale_cap}")
        self.steps = steps
        self.coefficients = coefficients
        self.scale_cap = scale_cap

    def cost(self, shape: torch.Size) -> float:
        if len(shape) < 2:
            return 0.0
        short, long = _sides(shape)
        # Two products with the short side twice, one with it three times.
        return self.steps * (4.0 * short**2 * long + 2.0 * short**3)

    def update(self, gradients: Gradients, state: State) -> tuple[Gradients, State]:
        factors = map_same_shape(
            lambda batch: (
                dimension_scale(batch.shape[1:], cap=self.scale_cap)
                * newton_schulz(batch, steps=self.steps, coefficients=self.coefficients)
            ),
            gradients,
        )
        return {name: factors[name].reshape(gradient.shape) for name, gradient in gradients.items()}, {}


class MagnitudeScale(Transform):
    """sigma_1(M) times another transform of M: keeps the magnitude that an orthogonalization forgets.

    `MagnitudeScale(Orthogonalize())` is DP-Muon-S after its momentum. Applies to matrices.

    Args:
        transform: a transform of matrices; it and sigma_1 receive the same input M.

    Raises:
        ConfigurationError: `transform` also selects parameters that are not matrices.
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__(applies_to="matrices")
        if transform.applies_to != "matrices":
            raise ConfigurationError(
                "MagnitudeScale: transform must apply to 'matrices', because only a matrix has a spectral "
                f"norm; it applies to {transform.applies_to!r}"
            )
        self.transform = transform
        self.has_momentum = transform.has_momentum

    def cost(self, shape: torch.Size) -> float:
        inner = self.transform.cost(shape)
        if not inner:
            return 0.0
        short, long = _sides(shape)
        # A Gram matrix and its eigenvalues (Golub and Van Loan, 8.3: 4/3 n^3).
        return inner + 2.0 * short**2 * long + 4 / 3 * short**3

    def update(self, gradients: Gradients, state: State) -> tuple[Gradients, State]:
        norms = map_same_shape(spectral_norm, gradients)
        output, new_state = self.transform.update(gradients, state)
        return {name: norms[name] * value for name, value in output.items()}, new_state


def _sides(shape: torch.Size) -> tuple[int, int]:
    rows, columns = shape[0], shape[1:].numel()
    return min(rows, columns), max(rows, columns)
