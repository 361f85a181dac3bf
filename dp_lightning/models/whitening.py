"""Centres and whitens the features that a private last layer is given.

A private gradient's noise is the same in all directions. What all features share, and the few directions in which they
vary most, take up the norm that an example may have; whitened, all directions learn alike.
"""

import torch
from torch import Tensor, nn

# Relative to the mean variance: directions with less are hardly raised.
_FLOOR = 0.03


class Whitening(nn.Module):
    """(N, D) to (N, D), each row x as S^(-1/2) (x - mean); the identity until `fit`."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("matrix", torch.eye(features))

    @torch.no_grad()
    def fit(self, points: Tensor) -> None:
        """Take the mean of public points (n, D), and S, their covariance and 0.03 of its mean eigenvalue."""
        self.mean.copy_(points.mean(dim=0))
        centred = (points - self.mean).double()
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(points))
        scale = (variances.clamp(min=0) + _FLOOR * variances.mean()).rsqrt()
        self.matrix.copy_((directions * scale) @ directions.T)

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) @ self.matrix
