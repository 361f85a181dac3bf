"""How close Newton-Schulz iterates come to the polar factor."""

import torch
from torch import Tensor

from dp_lightning.postprocess import newton_schulz, polar_factor


def newton_schulz_cosines(matrix: Tensor, *, steps: int = 5, coefficients: str = "muon") -> Tensor:
    """The cosine between the k-th iterate X_k and the polar factor U V^T, for k = 0 to ``steps``.

    X_0 is the matrix itself.

    Args:
        matrix: (..., m, n).
        steps: number of iterations, at least 1.
        coefficients: see `newton_schulz`.

    Returns:
        (steps + 1, ...), float64.
    """
    matrix = matrix.double()
    exact = polar_factor(matrix)
    iterates = [matrix]
    iterates += [newton_schulz(matrix, steps=k, coefficients=coefficients) for k in range(1, steps + 1)]
    return torch.stack([torch.cosine_similarity(x.flatten(-2), exact.flatten(-2), dim=-1) for x in iterates])
