"""What is known about the singular values of a signal in Gaussian noise of known level.

Y = X + noise * Z is an m x n matrix with m <= n, Z has independent standard normal entries and X has low rank. Without
signal the singular values of Y fill the bulk noise * [sqrt(n) - sqrt(m), sqrt(n) + sqrt(m)]. A singular value x of X
above noise * (m n)^(1/4) shows above the bulk as noise * sqrt(n) * y with

    y^2 = (z + 1/z) (z + beta/z),   z = x / (noise * sqrt(n)),   beta = m / n,

and smaller ones cannot be told from noise (Benaych-Georges and Nadakuditi 2012). All of this is the limit of large
matrices; at the sizes of convolutions it holds to a few per cent.
"""

import math

import torch
from torch import Tensor

# 99 % quantile of the Tracy-Widom distribution for real matrices (Bejan 2005).
_TRACY_WIDOM_99 = 2.0234


def noise_edge(rows: int, columns: int) -> float:
    """The value that the largest singular value of standard normal noise exceeds once in a hundred draws.

    sqrt(mu + 2.02 s) with mu = (sqrt(n - 1) + sqrt(m))^2 and s = (sqrt(n - 1) + sqrt(m)) (1 / sqrt(n - 1) + 1 /
    sqrt(m))^(1/3): Johnstone 2001. It approaches sqrt(m) + sqrt(n) from above.
    """
    a, b = math.sqrt(max(max(rows, columns) - 1, 1)), math.sqrt(min(rows, columns))
    return math.sqrt((a + b) ** 2 + _TRACY_WIDOM_99 * (a + b) * (1 / a + 1 / b) ** (1 / 3))


def signal_values(values: Tensor, rows: int, columns: int, noise: Tensor) -> Tensor:
    """The singular values of X behind those of Y; zero within the bulk, where they cannot be told from noise.

    Args:
        values: singular values of Y, (..., r).
        rows, columns: of Y.
        noise: the level, (...). Where it is zero the values are returned as they are.
    """
    y, beta, scale = _normalized(values, rows, columns, noise)
    inner = y.square() - beta - 1
    z = ((inner + (inner.square() - 4 * beta).clamp_min(0).sqrt()) / 2).clamp_min(0).sqrt()
    signal = torch.where(y > 1 + math.sqrt(beta), z, 0.0)
    return torch.where(scale > 0, scale * signal, values).to(values.dtype)


def shrunk_values(values: Tensor, rows: int, columns: int, noise: Tensor) -> Tensor:
    """The best singular values for an estimate of X with the singular vectors of Y.

    The error in the Frobenius norm is smallest at (Gavish and Donoho 2017)

        sqrt((y^2 - beta - 1)^2 - 4 beta) / y

    for y above the edge 1 + sqrt(beta) of the bulk, and at zero below it. It is z c d, where c and d are the cosines
    between the singular vectors of Y and those of X. The arguments are those of `signal_values`.
    """
    y, beta, scale = _normalized(values, rows, columns, noise)
    above = y > 1 + math.sqrt(beta)
    shrunk = ((y.square() - beta - 1).square() - 4 * beta).clamp_min(0).sqrt() / torch.where(above, y, 1.0)
    return torch.where(scale > 0, scale * torch.where(above, shrunk, 0.0), values).to(values.dtype)


def _normalized(values: Tensor, rows: int, columns: int, noise: Tensor) -> tuple[Tensor, float, Tensor]:
    short, long = min(rows, columns), max(rows, columns)
    scale = noise.double().unsqueeze(-1) * math.sqrt(long)
    return values.double() / scale, short / long, scale
