"""When the first singular direction of a gradient survives the noise: at which batch size, or at which gradient.

G~ = G + N is m x n, N has independent entries of standard deviation sigma S / B. Two thresholds:

- recovery: sin(angle) <= ||N||_2 / (s_1 - s_2) for the leading singular vectors of G~ and G (Wedin 1972), and
  ||N||_2 <= (sigma S / B) (sqrt(m) + sqrt(n)) with high probability. The bound is below one if B exceeds

      B* = sigma S (sqrt(m) + sqrt(n)) / (s_1 - s_2)

  This is sufficient but not necessary. Shanmugam et al. 2026 call it the recovery condition.
- detection: for a matrix of low rank the leading singular vectors correlate if s_1 exceeds (sigma S / B) (m n)^(1/4)
  (Benaych-Georges and Nadakuditi 2012), that is, if B exceeds

      B = sigma S (m n)^(1/4) / s_1.

  Below it they are independent of G in the limit of large matrices. With s_2 = 0 it is smaller than B* by the factor
  (sqrt(m) + sqrt(n)) / (m n)^(1/4): 2 for square matrices, 2.3 for sides in the ratio 1 to 9.
"""

import torch
from torch import Tensor

# Noise values that are drawn at once: 32 million.
_ENTRIES = 2**25


def recovery_gap(rows: int, columns: int, *, noise_level: float) -> float:
    """The gap s_1 - s_2 above which Wedin's bound is informative, (sqrt(m) + sqrt(n)) times the noise.

    With sigma S as the level of the noise, B* is this over the gap of the gradient.

    Args:
        rows, columns: Shape of the matrix.
        noise_level: Standard deviation of the noise in each entry, sigma S / B.
    """
    return noise_level * (rows**0.5 + columns**0.5)


def detection_norm(rows: int, columns: int, *, noise_level: float) -> float:
    """The s_1 of the spiked-matrix threshold, (m n)^(1/4) times the noise; arguments as of `recovery_gap`."""
    return noise_level * (rows * columns) ** 0.25


def direction_recovery(values: Tensor, rows: int, columns: int, *, noise_level: float, trials: int = 100) -> Tensor:
    """|<u_1(G~), u_1(G)>| for independent draws of the noise, with u_1 the singular vector of the shorter side.

    Since the noise is invariant under rotations, only the singular values of G matter, and G is taken to be diagonal.

    Args:
        values: Singular values of G in any order, at most min(rows, columns) of them; the two largest must differ.
        rows, columns: Shape of G.
        noise_level: Standard deviation of the noise in each entry.
        trials: Number of draws, the same ones in each call.

    Returns:
        (trials,), float32.
    """
    short, long = min(rows, columns), max(rows, columns)
    signal = torch.zeros(short, long)
    ordered = values.float().sort(descending=True).values
    signal[range(len(ordered)), range(len(ordered))] = ordered
    generator = torch.Generator().manual_seed(0)
    found = []
    for start in range(0, trials, at_once := max(1, _ENTRIES // (short * long))):
        noise = torch.randn(min(at_once, trials - start), short, long, generator=generator)
        noised = signal + noise_level * noise
        vectors = torch.linalg.eigh(noised @ noised.mT).eigenvectors
        found.append(vectors[:, 0, -1].abs())
    return torch.cat(found)
