"""What one physical batch contributes to a few parameters, per example until the weights are known."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.workspace import Workspace

_WIDENED_ROWS = 8
# Squares are added up in float32 over pieces of this length and in float64 from there on.
_PIECE = 256


Weights = Mapping[str, Tensor]
"""Parameter name to the factor of each example, (r,) float32; zero where the gradient is not finite."""

Weigh = Callable[[slice, Mapping[str, Tensor]], Weights]
"""Maps squared norms, parameter name to (r,) float64, of a range of r examples to their weights."""


class Contribution(ABC):
    """Per-example gradients of a few parameters for the b examples of a physical batch.

    Either the norms are read first and one weighted sum over the examples is computed later (``measure``,
    ``squared_norms``, ``weighted_sum``), or, if the norms of these parameters alone decide, both are computed at once
    (``stream``). Sums are float32. What is summed is what was measured: the same rounded values enter both, or a bound
    on the difference is part of the norm.
    """

    method: str
    """How the gradients are computed, in a few words."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""

    @abstractmethod
    def formed(self) -> "PerExample":
        """The gradients themselves, in memory of their own."""

    @abstractmethod
    def measure(self, workspace: Workspace) -> None:
        """Compute what the norms need while the tensors are still in the cache; keep what the sum needs."""

    @abstractmethod
    def squared_norms(self) -> dict[str, Tensor]:
        """Parameter name to (b,) float64 squared L2 norms; after ``measure``."""

    @abstractmethod
    def weighted_sum(self, weights: Weights) -> dict[str, Tensor]:
        """Sum over i of weights[name][i] * gradient_i, float32, for each name; after ``measure``."""

    def stream(self, weigh: Weigh, workspace: Workspace) -> dict[str, Tensor]:
        """Norms, weights and weighted sum in one go, with nothing kept."""
        self.measure(workspace)
        return self.weighted_sum(weigh(slice(None), self.squared_norms()))


class PerExample(Contribution):
    """Per-example gradients that exist as tensors of shape (b, *parameter.shape)."""

    def __init__(self, gradients: dict[str, Tensor], method: str) -> None:
        self.gradients, self.method = gradients, method

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    def formed(self) -> "PerExample":
        return self

    def measure(self, workspace: Workspace) -> None:
        return None

    def squared_norms(self) -> dict[str, Tensor]:
        return {name: squared_norms(gradient) for name, gradient in self.gradients.items()}

    def weighted_sum(self, weights: Weights) -> dict[str, Tensor]:
        return {name: weighted_rows(gradient, weights[name]) for name, gradient in self.gradients.items()}


def sum_of_views(rows: Tensor, augmult: int) -> Tensor:
    """(b * K, ...) as (b, ...), the K rows of each example added up."""
    return rows if augmult == 1 else rows.unflatten(0, (-1, augmult)).sum(1)


def flat_rows(rows: Tensor) -> Tensor:
    """(b, ...) as (b, numbers of a row); a row may be a single number without dimensions."""
    return rows.unsqueeze(-1).flatten(1)


def squared_norms(rows: Tensor) -> Tensor:
    """(b,) float64 squared norms of the rows (b, ...), with a relative error of at most 1e-6.

    A float32 sum over a whole row of a million numbers can be too small by a thousandth.
    """
    rows = flat_rows(rows)
    whole = rows.shape[1] // _PIECE * _PIECE
    if rows.dtype == torch.float64 or whole < 4 * _PIECE:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    pieces = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _PIECE)), dim=2, dtype=torch.float32)
    squares = pieces.double().square_().sum(1)
    return squares if whole == rows.shape[1] else squares + squared_norms(rows[:, whole:])


def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over i of weights[i] * rows[i], float32, without the rows (b, ...) whose weight is zero."""
    if rows.dtype == torch.float32:
        return (flat_rows(without(rows, weights)).T @ weights).view(rows.shape[1:])
    total = torch.zeros(rows.shape[1:], dtype=torch.float32, device=rows.device)
    # In pieces, so that a copy in float32 never exists as a whole.
    for piece in zip(rows.split(_WIDENED_ROWS), weights.split(_WIDENED_ROWS), strict=True):
        add_weighted(total, *piece)
    return total


def add_weighted(total: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Add ``weighted_rows`` of a few rows to the float32 ``total``."""
    total.view(-1).addmv_(flat_rows(without(rows, weights)).float().T, weights)


def scaled(rows: Tensor, weights: Tensor) -> Tensor:
    """(r, ...) weights[i] * rows[i], with all of a row set to zero if any number of it is not finite.

    A large weight can take numbers out of the type's range; a row with a weight of zero may hold anything.
    """
    products = rows * weights.view(-1, *[1] * (rows.dim() - 1)).to(rows.dtype)
    # On a CPU, checking the weights is cheaper than checking the products; on a GPU it would wait for the device.
    if weights.device.type == "cpu" and bool(((weights > 0) & (weights <= 1)).all()):
        return products
    return without(products, products.flatten(1).isfinite().all(dim=1))


def without(rows: Tensor, weights: Tensor) -> Tensor:
    """``rows`` (r, ...) with zeros where the weight (r,) is zero or False; a product fails, since 0 * nan is nan."""
    # On a CPU, checking is cheaper than copying; on a GPU it would wait for the device.
    if weights.device.type == "cpu" and bool(weights.all()):
        return rows
    return rows.masked_fill((weights == 0).view(-1, *[1] * (rows.dim() - 1)), 0.0)


def add_up(first: PerExample, second: PerExample) -> PerExample:
    """Add up contributions of the same examples from two uses of the parameters, before the norm is computed."""
    gradients = dict(first.gradients)
    for name, gradient in second.gradients.items():
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return PerExample(gradients, first.method)
