"""Functions of matrices: views, norms, the polar factor, and functions of the singular values.

All functions work on batches: the last two dimensions are the matrix. Half-precision input is computed in
float32 and returned in its own dtype; float32 and float64 are kept.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError


def as_matrix(tensor: Tensor) -> Tensor:
    """View a parameter of two or more dimensions as (out, everything else).

    A convolution kernel (O, I, kh, kw) becomes O x (I kh kw). Raises `ValueError` below two dimensions.
    """
    if tensor.ndim < 2:
        raise ValueError(f"a matrix needs two or more dimensions, got the shape {tuple(tensor.shape)}")
    return tensor.flatten(1)


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape, viewed as (out, everything else), has two sides longer than one.

    The others are vectors however they are laid out: their only singular value is their norm.
    """
    return len(shape) >= 2 and shape[0] > 1 and math.prod(shape[1:]) > 1


def dimension_scale(shape: Sequence[int], *, cap: float = 4.0) -> float:
    """min(cap, sqrt(max(1, m/n))) for a parameter of this shape viewed as m x n (Shanmugam et al. 2026).

    Raises:
        ConfigurationError: the cap is not positive.
    """
    if not cap > 0:
        raise ConfigurationError(f"scale_cap must be positive, got {cap}")
    m, n = shape[0], math.prod(shape[1:])
    return min(cap, math.sqrt(max(1.0, m / max(1, n))))


def polar_factor(matrix: Tensor) -> Tensor:
    """The exact polar factor U V^T of each matrix (..., m, n), by a singular value decomposition.

    Directions whose singular value is zero to rounding stay zero, so a zero matrix gives a zero matrix.
    """
    u, s, vh = torch.linalg.svd(at_least_float32(matrix), full_matrices=False)
    # The usual threshold of a numerical rank (Golub and Van Loan, 5.5).
    threshold = max(matrix.shape[-2:]) * torch.finfo(s.dtype).eps * s[..., :1]
    return ((u * (s > threshold).to(u.dtype).unsqueeze(-2)) @ vh).to(matrix.dtype)


def singular_values(matrix: Tensor) -> Tensor:
    """All singular values of each matrix in ascending order, (..., m, n) to (..., min(m, n)).

    They are the roots of the eigenvalues of the smaller Gram matrix. Squaring costs accuracy for small singular
    values but not for the largest, whose relative error is about 1e-6 in float32 and 1e-15 in float64.
    """
    _, largest, gram = _scaled_with_gram(matrix)
    return (largest.squeeze(-1) * torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()).to(matrix.dtype)


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest singular value of each matrix: (..., m, n) to (...). See `singular_values`."""
    return singular_values(matrix)[..., -1]


def map_singular_values(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """U f(S) V^T for each matrix U S V^T, by the eigenvectors of the smaller Gram matrix and one product.

    Cheaper than a singular value decomposition. Squaring costs accuracy for small singular values: those below
    3e-4 sigma_1 in float32 (1e-8 in float64) are treated as zero, with f(0) = 0; those up to ten times as large are
    accurate to a few per cent.

    Args:
        matrix: (..., m, n).
        function: singular values (..., min(m, n)), in ascending order, to new ones of the same shape.

    Returns:
        (..., m, n), the dtype of `matrix`.
    """
    x, largest, gram = _scaled_with_gram(matrix)
    squares, vectors = torch.linalg.eigh(gram)
    floor = torch.finfo(x.dtype).eps * squares[..., -1:].clamp_min(0)
    values = squares.clamp_min(0).sqrt()
    present = squares > floor
    factors = function(values * largest.squeeze(-1)) / torch.where(present, values, 1.0)
    scaled = vectors * torch.where(present, factors, 0.0).unsqueeze(-2)
    wide = x.shape[-2] <= x.shape[-1]
    result = scaled @ (vectors.mT @ x) if wide else (x @ scaled) @ vectors.mT
    return result.to(matrix.dtype)


def _scaled_with_gram(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each matrix over its largest entry, that entry (..., 1, 1), and the smaller Gram matrix of the quotient."""
    x = at_least_float32(matrix)
    largest = nonzero(x.abs().amax((-2, -1), keepdim=True))
    x = x / largest
    return x, largest, x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def map_same_shape(
    function: Callable[..., Tensor], tensors: Mapping[str, Tensor], *numbers: Mapping[str, float | None]
) -> dict[str, Tensor]:
    """Apply a batched matrix function to tensors viewed as matrices; those of the same shape form one batch.

    Args:
        function: (k, m, n), and for each of `numbers` a (k,) tensor, to (k, ...), treating each of the k matrices
            on its own.
        tensors: parameters of two or more dimensions, by name.
        numbers: mappings with one number for each of the names.

    Returns:
        For each name its slice of the function's result (still in matrix form).
    """
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        groups[as_matrix(tensor).shape, tensor.dtype, tensor.device].append(name)
    results: dict[str, Tensor] = {}
    for names in groups.values():
        batch = torch.stack([as_matrix(tensors[name]) for name in names])
        dtype = at_least_float32(batch).dtype
        columns = [torch.tensor([of[name] for name in names], dtype=dtype).to(batch.device) for of in numbers]
        results.update(zip(names, function(batch, *columns).unbind(), strict=True))
    return results


def at_least_float32(matrix: Tensor) -> Tensor:
    """The matrix, in float32 if it is in half precision."""
    return matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix


def unit_range(matrix: Tensor) -> Tensor:
    """Divide each matrix by its largest entry, so that no norm of it can overflow or underflow."""
    return matrix / nonzero(matrix.abs().amax((-2, -1), keepdim=True))


def nonzero(value: Tensor) -> Tensor:
    """The value, or the smallest normal number if that is larger, for use as a divisor."""
    return value.clamp_min(torch.finfo(value.dtype).tiny)
