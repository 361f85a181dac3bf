"""Newton-Schulz orthogonalization: pushes all singular values of a matrix towards one by matrix products alone.

It starts from X = M / ||M||_F and repeats

    X <- a X + b (X X^T) X + c (X X^T)^2 X,

which maps each singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors alone. The presets:

- ``muon`` (Jordan et al. 2024): a = 3.4445, b = -4.7750, c = 2.0315 at every step, a steep slope at zero at the price
  of a fixed point that is not 1.
- ``polar_express`` (Amsel et al. 2025): a different polynomial at each step, the one that brings the interval in which
  the singular values then lie closest to 1. It converges to the polar factor.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import at_least_float32, nonzero, unit_range

Coefficients = tuple[float, float, float]

MUON: Coefficients = (3.4445, -4.7750, 2.0315)

#: The polynomials of Amsel et al. 2025, section 4.4, for singular values from 0.001 on; the last one is repeated.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.287212018145626, -23.595886519098826, 17.300387312530923),
    (4.107059111542196, -2.947849916737906, 0.5448431082926596),
    (3.9486908534822933, -2.908902115962946, 0.5518191394370128),
    (3.318419657370606, -2.4884880243148784, 0.5100489401237209),
    (2.3006520199548173, -1.66890398457475, 0.41880731195256743),
    (1.8913014077873989, -1.2679958271945893, 0.37680408948524974),
    (1.8750014808625086, -1.2500016454181375, 0.37500016455655294),
    (1.8749999980503387, -1.2499999961006776, 0.37499999805033873),
    (15 / 8, -10 / 8, 3 / 8),
)
_ROOM = 1.01  # a margin of one per cent for rounding, as in the paper


def newton_schulz(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Coefficients = "muon",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Push all singular values of each matrix towards one by the quintic Newton-Schulz iteration.

    With the "muon" coefficients this does **not** converge to the polar factor U V^T, however many steps it
    takes: after five steps the singular values of a well-conditioned matrix lie in about [0.68, 1.14] and keep
    moving in that band. Singular values far below the largest grow by at most 3.4445 per step, 485-fold
    in five, and may be left below it: the smallest one of a square Gaussian matrix may end near zero. With
    "polar_express" those above 0.001 ||M||_F come within about 1 % of one in six steps, and smaller ones grow at
    most 1850-fold. Use `polar_factor` if the exact value matters. The result does not depend on the scale of
    the input.

    Args:
        matrix: (..., m, n). A zero matrix gives a zero matrix.
        steps: number of iterations, at least 1.
        coefficients: (a, b, c), or "muon" or "polar_express".
        dtype: the dtype of the products, such as torch.bfloat16; None is that of `matrix`, and at least float32.

    Returns:
        (..., m, n), the dtype of `matrix`.

    Raises:
        ConfigurationError: `steps` below 1, or coefficients that are neither a preset nor three finite
            numbers.
    """
    polynomials = check_newton_schulz(steps, coefficients)
    x = unit_range(at_least_float32(matrix)).reshape(-1, *matrix.shape[-2:])
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / nonzero(torch.linalg.matrix_norm(x, keepdim=True))
    if dtype is not None:
        x = x.to(dtype)
    for a, b, c in polynomials:
        gram = x @ x.mT
        # The sums are fused into the products, so they are rounded once, which half precision needs.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if transposed else x).to(matrix.dtype).reshape(matrix.shape)


def check_newton_schulz(steps: int, coefficients: str | Coefficients) -> Sequence[Coefficients]:
    """(a, b, c) of each step; raises `ConfigurationError` for settings Newton-Schulz cannot use."""
    if not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"steps must be a whole number of at least 1, got {steps}")
    if coefficients == "polar_express":
        return polar_express(steps)
    polynomial = MUON if coefficients == "muon" else coefficients
    if isinstance(polynomial, str) or len(polynomial) != 3 or not all(math.isfinite(value) for value in polynomial):
        raise ConfigurationError(
            f"coefficients must be muon, polar_express or three finite numbers (a, b, c), got {coefficients!r}"
        )
    a, b, c = polynomial
    return ((a, b, c),) * steps


def polar_express(steps: int) -> tuple[Coefficients, ...]:
    """(a, b, c) of each step of `POLAR_EXPRESS`, with one per cent of room in all but the last."""
    chosen = [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)]
    return (*((a / _ROOM, b / _ROOM**3, c / _ROOM**5) for a, b, c in chosen[:-1]), chosen[-1])
