"""Functions of matrices that the orthogonalizing transforms are made of.

Newton-Schulz orthogonalization (Jordan et al. 2024, "Muon") starts from X = M / ||M||_F and repeats

    X <- a X + b (X X^T) X + c (X X^T)^2 X,

which maps each singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors alone. The exact
polar factor U V^T of M = U S V^T stands beside it as the reference.

All functions work on batches: the last two dimensions are the matrix. Half-precision input is computed in
float32 and returned in its own dtype; float32 and float64 are kept.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError

Coefficients = tuple[float, float, float]

# Jordan et al. 2024: a steep slope at zero (3.4445), bought with a fixed point that is not 1.
PRESETS: dict[str, Coefficients] = {"muon": (3.4445, -4.7750, 2.0315)}


def as_matrix(tensor: Tensor) -> Tensor:
    """View a parameter of two or more dimensions as (out, everything else).

    A convolution kernel (O, I, kh, kw) becomes O x (I kh kw). Raises `ValueError` below two dimensions.
    """
    if tensor.ndim < 2:
        raise ValueError(f"a matrix needs two or more dimensions, got the shape {tuple(tensor.shape)}")
    return tensor.flatten(1)


def dimension_scale(shape: Sequence[int], *, cap: float = 4.0) -> float:
    """min(cap, sqrt(max(1, m/n))) for a parameter of this shape viewed as m x n (Shanmugam et al. 2026)."""
    m, n = shape[0], math.prod(shape[1:])
    return min(cap, math.sqrt(max(1.0, m / max(1, n))))


def newton_schulz(matrix: Tensor, *, steps: int = 5, coefficients: str | Coefficients = "muon") -> Tensor:
    """Push all singular values of each matrix towards one by the quintic Newton-Schulz iteration.

    With the "muon" coefficients this does **not** converge to the polar factor U V^T, however many steps it
    takes: after five steps the singular values of a well-conditioned matrix lie in about [0.68, 1.14] and go
    on moving in that band. Singular values far below the largest grow by at most 3.4445 per step, 485-fold
    in five, and may be left below it: a square Gaussian matrix of 64 x 64 may end in [0.1, 1.2]. Use
    `polar_factor` where the exact value matters. The result does not depend on the scale of the input.

    Args:
        matrix: (..., m, n). A zero matrix gives a zero matrix.
        steps: number of iterations, at least 1.
        coefficients: (a, b, c), or the name of a preset: "muon" is (3.4445, -4.7750, 2.0315).

    Returns:
        (..., m, n), the dtype of `matrix`.

    Raises:
        ConfigurationError: `steps` below 1, or coefficients that are neither a preset nor three finite
            numbers.
    """
    a, b, c = check_newton_schulz(steps, coefficients)
    x = _unit_range(_at_least_float32(matrix))
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / _nonzero(torch.linalg.matrix_norm(x, keepdim=True))
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if transposed else x).to(matrix.dtype)


def polar_factor(matrix: Tensor) -> Tensor:
    """The exact polar factor U V^T of each matrix (..., m, n), by a singular value decomposition.

    Directions whose singular value is zero to rounding stay zero, so a zero matrix gives a zero matrix.
    """
    u, s, vh = torch.linalg.svd(_at_least_float32(matrix), full_matrices=False)
    # The usual threshold of a numerical rank (Golub and Van Loan, 5.5).
    threshold = max(matrix.shape[-2:]) * torch.finfo(s.dtype).eps * s[..., :1]
    return ((u * (s > threshold).to(u.dtype).unsqueeze(-2)) @ vh).to(matrix.dtype)


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest singular value of each matrix: (..., m, n) to (...).

    It is the root of the largest eigenvalue of the smaller Gram matrix, all eigenvalues of which are
    computed: no power iteration and no tolerance to choose. Squaring costs accuracy for small singular values
    and none for the largest: the relative error is about 1e-6 in float32 and 1e-15 in float64.
    """
    x = _at_least_float32(matrix)
    largest = _nonzero(x.abs().amax((-2, -1)))
    x = x / largest[..., None, None]
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    eigenvalue = torch.linalg.eigvalsh(gram)[..., -1]
    return (largest * eigenvalue.clamp_min(0).sqrt()).to(matrix.dtype)


def map_same_shape(function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply a batched matrix function to tensors viewed as matrices; same shapes go through as one batch.

    Args:
        function: (k, m, n) to (k, ...), treating each of the k matrices on its own.
        tensors: parameters of two or more dimensions, by name.

    Returns:
        For each name its slice of the function's result (still in matrix form).
    """
    groups: dict[tuple, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        groups[as_matrix(tensor).shape, tensor.dtype, tensor.device].append(name)
    results: dict[str, Tensor] = {}
    for names in groups.values():
        batch = torch.stack([as_matrix(tensors[name]) for name in names])
        results.update(zip(names, function(batch).unbind(), strict=True))
    return results


def check_newton_schulz(steps: int, coefficients: str | Coefficients) -> Coefficients:
    """The coefficients as numbers; raises `ConfigurationError` for settings Newton-Schulz cannot use."""
    if steps < 1:
        raise ConfigurationError(f"steps must be at least 1, got {steps}")
    if isinstance(coefficients, str):
        if coefficients not in PRESETS:
            raise ConfigurationError(
                f"coefficients must be one of {sorted(PRESETS)} or (a, b, c), got {coefficients!r}"
            )
        return PRESETS[coefficients]
    if len(coefficients) != 3 or not all(math.isfinite(value) for value in coefficients):
        raise ConfigurationError(f"coefficients must be three finite numbers (a, b, c), got {coefficients}")
    a, b, c = coefficients
    return a, b, c


def _at_least_float32(matrix: Tensor) -> Tensor:
    return matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix


def _unit_range(matrix: Tensor) -> Tensor:
    """Divide each matrix by its largest entry, so that no norm of it can overflow or underflow."""
    return matrix / _nonzero(matrix.abs().amax((-2, -1), keepdim=True))


def _nonzero(value: Tensor) -> Tensor:
    return value.clamp_min(torch.finfo(value.dtype).tiny)
