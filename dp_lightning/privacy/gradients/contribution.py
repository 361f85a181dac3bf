"""What a rule sees of a function, and what a physical batch contributes, per example until the weights are known."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.cost_model import examples_at_a_time
from dp_lightning.processors import read_at_once

# Rows of 16 bits that are copied in float32 at a time on a CPU.
_WIDENED_ROWS = 8
# Squares are added up in float32 over parts of at most so many numbers, and in float64 from there on. Shorter parts
# are not worth their number.
_LONG, _SHORT = 256, 16
# Gradients of at most so many numbers are taken together.
_SMALL = 2**13


@dataclass(frozen=True)
class Call:
    """A call of a function on all rows of a physical batch.

    Attributes:
        inputs: what the function saw, (b * K, ...); the K rows of an example follow each other.
        arguments: the other arguments by name; trained ones are detached.
        names: maps each trained argument to the name under which its gradients are handed over.
        rows: K. It is 1 if the function saw no dimension of rows.
    """

    inputs: Tensor
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    rows: int


Weights = Mapping[str, Tensor]
"""Parameter name to the factor of each example, (r,) float32; zero where the gradient is not finite."""

Weigh = Callable[[slice, Mapping[str, Tensor]], Weights]
"""Maps the norms of parts, parameter name to (r, k), of a range of r examples to their weights."""


class Contribution(ABC):
    """Per-example gradients of a few parameters for the b examples of a physical batch.

    Either the norms are read first and the weighted sums over the examples are computed later (``measure``, then
    ``norms`` and ``rows``, then ``add_weighted``), or, if the norms of these parameters alone decide, both are computed
    at once (``stream``). Sums are float32. What is summed is what was measured: the same rounded values enter both, or
    a bound on the difference is part of the norm.
    """

    names: tuple[str, ...]
    """The names of the parameters."""

    kind: Hashable = None
    """What `joined` takes is equal in it; None if that takes nothing."""

    def joined(self, others: Sequence[Any]) -> "Contribution":
        """One contribution in place of several of a kind, none of which is measured yet."""
        raise NotImplementedError

    @abstractmethod
    def formed(self) -> "PerExample":
        """The gradients themselves, in memory of their own."""

    def measure(self) -> None:  # noqa: B027
        """Compute what the norms need while the tensors are still in the cache; keep what the sum needs."""

    @property
    def grows(self) -> bool:
        """Whether ``measure`` keeps more numbers than the contribution holds before."""
        return False

    @property
    def rows(self) -> Mapping[str, Tensor]:
        """Parameter name to gradients (b, *shape) that are so small that they are best taken together with others.

        There are more after ``measure`` where not all parameters have some before.
        """
        return {}

    @abstractmethod
    def norms(self) -> dict[str, Tensor]:
        """Name of each parameter without ``rows`` to norms (b, k) of the k parts of its gradient; after ``measure``.

        The squares of a row add up to the squared L2 norm, which is at most 1e-6 off.
        """

    @abstractmethod
    def add_weighted(self, weights: Weights, sums: Mapping[str, Tensor]) -> None:
        """Add the sum over i of weights[name][i] * gradient_i to sums[name], for each name of ``norms``."""

    def stream(self, weigh: Weigh, sums: Mapping[str, Tensor]) -> None:
        """Compute norms, weights and weighted sums at once, also those of ``rows``, and keep nothing."""
        self.measure()
        self.add_measured(weigh, sums)

    def add_measured(self, weigh: Weigh, sums: Mapping[str, Tensor]) -> None:
        """Compute weights from what ``measure`` has kept, and add the weighted sums, also those of ``rows``."""
        weights = weigh(slice(None), self.norms() | {name: part_norms(rows) for name, rows in self.rows.items()})
        self.add_weighted(weights, sums)
        for name, rows in self.rows.items():
            add_weighted(sums[name], rows, weights[name])


class PerExample(Contribution):
    """Per-example gradients that exist as tensors of shape (b, *parameter.shape)."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        self.gradients, self.names = gradients, tuple(gradients)
        self._rows = {name: rows for name, rows in gradients.items() if rows.shape[1:].numel() <= _SMALL}

    @property
    def rows(self) -> Mapping[str, Tensor]:
        return self._rows

    def formed(self) -> "PerExample":
        return self

    def norms(self) -> dict[str, Tensor]:
        return {name: part_norms(rows) for name, rows in self.gradients.items() if name not in self._rows}

    def add_weighted(self, weights: Weights, sums: Mapping[str, Tensor]) -> None:
        for name, rows in self.gradients.items():
            if name not in self._rows:
                add_weighted(sums[name], rows, weights[name])


def sum_of_views(rows: Tensor, augmult: int) -> Tensor:
    """(b * K, ...) as (b, ...), the K rows of each example added up."""
    return rows if augmult == 1 else rows.unflatten(0, (-1, augmult)).sum(1)


def flat_rows(rows: Tensor) -> Tensor:
    """(b, ...) as (b, numbers of a row); a row may be a single number without dimensions."""
    return rows.unsqueeze(-1).flatten(1)


def part_norms(rows: Tensor) -> Tensor:
    """(b, k) L2 norms of parts of the rows (b, ...): their squares add up to a row's, with an error of at most 1e-6.

    A float32 sum over a whole row of a million numbers can be too small by a thousandth. Add the squares in float64.
    """
    rows = flat_rows(rows)
    length = _part(rows.shape[1])
    if rows.dtype == torch.float64 or length < _SHORT:
        return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return torch.linalg.vector_norm(rows.unflatten(1, (-1, length)), dim=2, dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def _part(numbers: int) -> int:
    """The length of the parts that a row is cut into: its largest divisor that is at most ``_LONG``."""
    return next(length for length in range(min(_LONG, max(numbers, 1)), 0, -1) if numbers % length == 0)


def add_weighted(total: Tensor, rows: Tensor, weights: Tensor, *, used_up: bool = False) -> None:
    """Add the sum over i of weights[i] * rows[i] to the float32 ``total``.

    Args:
        total: of the shape of a row.
        rows: (b, ...); those whose weight is zero may hold numbers that are not finite.
        weights: (b,) float32.
        used_up: whether ``rows`` may be changed.
    """
    places = total.view(-1) if total.is_contiguous() else torch.zeros(total.numel(), device=total.device)
    # In pieces, so that a copy in float32 never exists as a whole.
    widened = _WIDENED_ROWS if read_at_once(rows.device) else examples_at_a_time(total.numel(), rows.device)
    step = len(rows) if rows.dtype == torch.float32 else widened
    for piece, factors in zip(rows.split(step), weights.split(step), strict=True):
        if used_up and not read_at_once(piece.device):
            # Faster than `without`; a row whose weight is not zero has only finite numbers.
            finite_(piece)
        else:
            piece = without(piece, factors)
        places.addmv_(flat_rows(piece).float().T, factors)
    if not total.is_contiguous():
        total += places.view(total.shape)


def joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The pieces as one tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), dim)


def scaled(rows: Tensor, weights: Tensor) -> Tensor:
    """weights[i] * rows[i] for weights (r) and rows (r, ...), or weights (r, L) or (r, 1) and rows (r, L, ...).

    All of a row is zero if any number of it is not finite: a large weight can take numbers out of the type's range, and
    a row with a weight of zero may hold anything.
    """
    products = rows * _for_rows(weights, rows).to(rows.dtype)
    if products.numel() == 0 or (read_at_once(weights.device) and bool(((weights > 0) & (weights <= 1)).all())):
        return products
    largest = torch.linalg.vector_norm(products.flatten(weights.dim()), ord=torch.inf, dim=-1)
    return without(products, largest < torch.inf)


def without(rows: Tensor, weights: Tensor) -> Tensor:
    """``rows`` with zeros where the weight, as in `scaled`, is zero or False; a product fails, since 0 * nan is nan."""
    if read_at_once(weights.device) and bool(weights.all()):
        return rows
    return rows.masked_fill(_for_rows(weights == 0, rows), 0.0)


def _for_rows(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.view(*weights.shape, *[1] * (rows.dim() - weights.dim()))


def finite_(rows: Tensor) -> None:
    """Put zeros in the place of numbers that are not finite."""
    rows.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
