"""Scales each example to the length 1."""

import torch.nn.functional as F
from torch import Tensor, nn


class UnitLength(nn.Module):
    """(N, D) to (N, D), each row divided by its Euclidean norm; a row of zeros stays zero."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=1)
