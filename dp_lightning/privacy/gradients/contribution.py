"""What one physical batch contributes to some parameters, kept per example until the norms are known."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class Contribution(ABC):
    """Per-example gradients of a few parameters for the b examples of a physical batch.

    First the norms are read, then one weighted sum over the examples is taken. Norms and sums are float32. What is
    summed is what was measured: the same rounded values enter ``squared_norms`` and ``weighted_sum``, or a bound of the
    difference is part of the norm.
    """

    @abstractmethod
    def squared_norms(self) -> dict[str, Tensor]:
        """Parameter name to (b,) float32 squared L2 norms."""

    @abstractmethod
    def discard(self, rows: Tensor) -> None:
        """Zero the examples where ``rows``, (b,) bool, is true: a zero weight does not, since 0 * nan is nan."""

    @abstractmethod
    def weighted_sum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over i of weights[name][i] * gradient_i, float32, for each name; weights are (b,) float32."""


class PerExample(Contribution):
    """Per-example gradients that exist as tensors of shape (b, *parameter.shape)."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        self.gradients = gradients

    def squared_norms(self) -> dict[str, Tensor]:
        return {name: _norms(gradient.flatten(1)).square() for name, gradient in self.gradients.items()}

    def discard(self, rows: Tensor) -> None:
        for name, gradient in self.gradients.items():
            self.gradients[name] = gradient.masked_fill(rows.view(-1, *[1] * (gradient.dim() - 1)), 0.0)

    def weighted_sum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: (weights[name] @ gradient.flatten(1).float()).view(gradient.shape[1:])
            for name, gradient in self.gradients.items()
        }


def _norms(rows: Tensor) -> Tensor:
    """(b,) float32 norms of the rows, added up in float32 at least."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).float()


def add_up(first: PerExample, second: PerExample) -> PerExample:
    """Contributions of the same examples by two uses of the parameters: they add up before the norm is taken."""
    gradients = dict(first.gradients)
    for name, gradient in second.gradients.items():
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return PerExample(gradients)
