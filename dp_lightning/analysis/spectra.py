"""How many directions a matrix has, where the singular values of noise lie, and how fast Newton-Schulz converges.

The singular values of an m x n matrix (m <= n) of independent N(0, s^2) entries fill s [sqrt(n) - sqrt(m), sqrt(n) +
sqrt(m)] with the density that Marchenko and Pastur 1967 give, in the limit of large matrices.
"""

import math

import torch
from torch import Tensor

from dp_lightning.postprocess import newton_schulz, polar_factor


def participation_ratio(values: Tensor) -> Tensor:
    """The effective rank of Shanmugam et al. 2026, (sum s)^2 / sum s^2: from 1 (one direction) to r.

    Args:
        values: Singular values, (..., r).

    Returns:
        (...); zero for a zero matrix.
    """
    total = values.square().sum(-1)
    return torch.where(total > 0, values.sum(-1).square() / total, 0.0)


def entropy_rank(values: Tensor) -> Tensor:
    """The effective rank of Roy and Vetterli 2007, exp(-sum p log p) with p = s / sum s.

    Args:
        values: Singular values, (..., r).

    Returns:
        (...); zero for a zero matrix.
    """
    total = values.sum(-1, keepdim=True)
    shares = values / torch.where(total > 0, total, 1.0)
    return torch.where(total.squeeze(-1) > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def bulk_edges(rows: int, columns: int, *, noise_level: float) -> tuple[float, float]:
    """The ends of the interval that the singular values of noise fill."""
    short, long = math.sqrt(min(rows, columns)), math.sqrt(max(rows, columns))
    return noise_level * (long - short), noise_level * (long + short)


def bulk_density(values: Tensor, rows: int, columns: int, *, noise_level: float) -> Tensor:
    """The density of the singular values of noise; it integrates to one.

    Args:
        values: Values at which the density is evaluated, (...).
        rows, columns: Shape of the matrix.
        noise_level: Standard deviation of each entry.

    Returns:
        (...); zero outside the bulk.
    """
    beta = min(rows, columns) / max(rows, columns)
    y = values / (noise_level * math.sqrt(max(rows, columns)))
    low, high = (1 - math.sqrt(beta)) ** 2, (1 + math.sqrt(beta)) ** 2
    inside = ((high - y.square()) * (y.square() - low)).clamp_min(0).sqrt()
    return torch.where(inside > 0, inside / (math.pi * beta * y), 0.0) / (noise_level * math.sqrt(max(rows, columns)))


def newton_schulz_cosines(matrix: Tensor, *, steps: int = 5, coefficients: str = "muon") -> Tensor:
    """The cosine between the k-th iterate X_k and the polar factor U V^T, for k = 0 to ``steps``.

    X_0 is the matrix itself.

    Args:
        matrix: (..., m, n).
        steps: Number of iterations, at least 1.
        coefficients: As of `newton_schulz`.

    Returns:
        (steps + 1, ...), float64.
    """
    matrix = matrix.double()
    exact = polar_factor(matrix)
    iterates = [matrix]
    iterates += [newton_schulz(matrix, steps=k, coefficients=coefficients) for k in range(1, steps + 1)]
    return torch.stack([torch.cosine_similarity(x.flatten(-2), exact.flatten(-2), dim=-1) for x in iterates])
