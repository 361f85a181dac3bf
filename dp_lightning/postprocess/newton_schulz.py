"""Newton-Schulz orthogonalization: pushes all singular values of a matrix towards one by matrix products alone.

It starts from X = M / ||M||_F and repeats

    X <- a X + b (X X^T) X + c (X X^T)^2 X,

which maps each singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors alone. The presets:

- ``muon`` (Jordan et al. 2024): a = 3.4445, b = -4.7750, c = 2.0315 at every step, a steep slope at zero at the price
  of a fixed point that is not 1.
- ``polar_express`` (Amsel et al. 2025): a different polynomial at each step, the one that brings the interval in which
  the singular values then lie closest to 1. It converges to the polar factor.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import at_least_float32, nonzero, unit_range

Coefficients = tuple[float, float, float]

MUON: Coefficients = (3.4445, -4.7750, 2.0315)
PRESETS = ("muon", "polar_express")

# Amsel et al. 2025, section 4.4: singular values from 0.001 on, polynomials for intervals no wider than 1 : 0.0241, and
# a margin of one per cent for rounding.
_SMALLEST = 1e-3
_NARROWEST = 0.02407327424182761
_ROOM = 1.01


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
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ConfigurationError(
                f"coefficients must be one of {', '.join(PRESETS)} or (a, b, c), got {coefficients!r}"
            )
        return polar_express(steps) if coefficients == "polar_express" else (MUON,) * steps
    if len(coefficients) != 3 or not all(math.isfinite(value) for value in coefficients):
        raise ConfigurationError(f"coefficients must be three finite numbers (a, b, c), got {coefficients}")
    a, b, c = coefficients
    return ((a, b, c),) * steps


@functools.cache
def polar_express(steps: int) -> tuple[Coefficients, ...]:
    """(a, b, c) of each step: the polynomial closest to 1 where the singular values then lie (Amsel et al. 2025)."""
    low, found = _SMALLEST, []
    high = 1.0
    for step in range(steps):
        polynomial = _closest_to_one(max(low, _NARROWEST * high), high)
        # Centre the image of the whole interval at 1.
        centre = (_value(polynomial, low) + _value(polynomial, high)) / 2
        a, b, c = (value / centre for value in polynomial)
        low = _value((a, b, c), low)
        high = 2 - low
        room = _ROOM if step < steps - 1 else 1.0
        found.append((a / room, b / room**3, c / room**5))
    return tuple(found)


def _closest_to_one(low: float, high: float) -> Coefficients:
    """The odd quintic with the smallest maximum distance to 1 on [low, high], by the Remez exchange algorithm."""
    if high - low < 1e-5 * high:
        # The limit of a narrow interval: 15/8, -10/8, 3/8 at 1 (the quintic Newton-Schulz iteration).
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    solution = (0.0, 0.0, 0.0)
    for _ in range(100):
        points = [low, *inner, high]
        # p(x_i) + (-1)^i e = 1: the error e alternates.
        system = torch.tensor([[x, x**3, x**5, (-1) ** i] for i, x in enumerate(points)], dtype=torch.float64)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        before, solution = solution, (a, b, c)
        if math.dist(before, solution) < 1e-12 * math.hypot(*solution):
            break
        # Roots of the derivative a + 3 b x^2 + 5 c x^4.
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return solution


def _value(polynomial: Coefficients, x: float) -> float:
    a, b, c = polynomial
    return a * x + b * x**3 + c * x**5
