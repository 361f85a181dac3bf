"""How well the first singular direction of a gradient survives the noise: by simulation, and in the limit.

G~ = G + N is m x n, m <= n, N has independent N(0, s^2) entries. Since the noise looks alike from every side, only the
singular values of G matter, and G is taken to be diagonal.
"""

import math

import torch
from torch import Tensor

# Noise that is drawn at once: 32 million numbers.
_ENTRIES = 2**25


def direction_recovery(
    values: Tensor, rows: int, columns: int, *, noise_level: float, trials: int = 100, seed: int = 0
) -> Tensor:
    """|<u_1(G~), u_1(G)>| of independent draws of the noise, u_1 the singular vector of the shorter side.

    Args:
        values: singular values of G in any order, at most min(rows, columns) of them; the two largest must differ.
        rows, columns: of G.
        noise_level: s.
        trials: number of draws.
        seed: of the draws.

    Returns:
        (trials,), float32.
    """
    short, long = min(rows, columns), max(rows, columns)
    signal = torch.zeros(short, long)
    ordered = values.float().sort(descending=True).values
    signal[range(len(ordered)), range(len(ordered))] = ordered
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start in range(0, trials, at_once := max(1, _ENTRIES // (short * long))):
        noise = torch.randn(min(at_once, trials - start), short, long, generator=generator)
        noised = signal + noise_level * noise
        vectors = torch.linalg.eigh(noised @ noised.mT).eigenvectors
        found.append(vectors[:, 0, -1].abs())
    return torch.cat(found)


def direction_cosine(top: float, rows: int, columns: int, *, noise_level: float) -> float:
    """The limit of the same for large matrices of rank one (Benaych-Georges and Nadakuditi 2012).

    With z = s_1 / (s sqrt(n)) and beta = m / n it is sqrt(1 - beta (1 + z^2) / (z^2 (z^2 + beta))), and zero up to
    z = beta^(1/4).

    Args:
        top: s_1.
        rows, columns, noise_level: see `direction_recovery`.
    """
    short, long = min(rows, columns), max(rows, columns)
    beta, z = short / long, top / (noise_level * math.sqrt(long))
    if z**4 <= beta:
        return 0.0
    return math.sqrt(1 - beta * (1 + z**2) / (z**2 * (z**2 + beta)))
