"""How many directions a matrix has, where the singular values of noise lie, and how large a signal is beside noise.

The singular values of an m x n matrix (m <= n) of independent N(0, s^2) entries fill s [sqrt(n) - sqrt(m), sqrt(n) +
sqrt(m)] with the density that Marchenko and Pastur 1967 give, in the limit of large matrices.
"""

import math

import torch
from torch import Tensor


def participation_ratio(values: Tensor) -> Tensor:
    """The effective rank of Shanmugam et al. 2026, (sum s)^2 / sum s^2: from 1 (one direction) to r.

    Args:
        values: Singular values, (..., r).

    Returns:
        (...); zero for a zero matrix.
    """
    total = values.square().sum(-1)
    return torch.where(total > 0, values.sum(-1).square() / total, 0.0)


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


def signal_to_noise(squares: float, count: int) -> float:
    """The signal-to-noise ratio ||G|| / ||N|| of a privatized gradient over some steps, from the gradient alone.

    A privatized gradient of d parameters is G~ = G + N, where N has independent N(0, s^2) entries and s = sigma S / B
    is known. Since E ||G~||^2 = ||G||^2 + s^2 d,

        snr^2 = ||G||^2 / (s^2 d) = E ||G~||^2 / (s^2 d) - 1.

    One step estimates snr^2 without bias, with a standard deviation of sqrt(2/d + 4 snr^2/d). Only the privatized
    gradient enters, so the estimate is post-processing. The same holds for the gradient of one parameter tensor. The
    average over steps is cut off at zero, and not its terms: if noise dominates, that would report the size of the
    fluctuations as a signal.

    Args:
        squares: Sum over the steps of ||G~||^2 / s^2, where s may differ from step to step.
        count: Number of the numbers squared in it: d for each step.
    """
    return math.sqrt(max(0.0, squares / count - 1))
