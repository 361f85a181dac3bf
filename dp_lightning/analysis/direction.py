"""How well the first singular direction of a gradient survives the noise, by simulation.

G~ = G + N is m x n, m <= n, N has independent N(0, s^2) entries. Since the noise is invariant under rotations, only the
singular values of G matter, and G is assumed to be diagonal.
"""

import torch
from torch import Tensor

# Numbers of noise that are drawn at once: 32 million.
_ENTRIES = 2**25


def direction_recovery(
    values: Tensor, rows: int, columns: int, *, noise_level: float, trials: int = 100, seed: int = 0
) -> Tensor:
    """|<u_1(G~), u_1(G)>| for independent draws of the noise, with u_1 the singular vector of the shorter side.

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
