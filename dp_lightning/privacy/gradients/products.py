"""Gradients that are sums of outer products: grad W_i = sum over positions t of g_it p_it^T = G_i^T P_i.

Linear layers and convolutions are of this form: g_it is the gradient of the layer's output at position t (a token, a
pixel), p_it what the weight multiplied there (the token, the patch under the kernel). There are three exact ways to the
norms and the weighted sum over examples:

* formed: G_i^T P_i by a matrix product, a few examples at a time, so that patches and gradients stay in the cache.
  Either each gradient is used up at once, where its norm decides alone, or all of them are kept until the norm over all
  layers is known.
* Gram: ||G_i^T P_i||^2 is the sum of the entrywise product of the Gram matrices G_i G_i^T and P_i P_i^T (Goodfellow
  2015; Bu et al. 2022), and the weighted sum is the ordinary weight gradient of the weighted output gradients. Terms of
  both signs cancel in the norm, so it is taken in float64. The weighted sum is float32; a bound of its rounding
  error is added to the norm.
* formed twice: for the norm, and again, all at once and weighted, for the sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.contribution import (
    Contribution,
    PerExample,
    Weigh,
    Weights,
    squared_norms,
    weighted_rows,
    without,
)
from dp_lightning.privacy.gradients.ways import examples_at_a_time, kept_way, streamed_way
from dp_lightning.privacy.gradients.workspace import Workspace

# Rounding of the float32 weighted sum, relative to the sum over positions of |g_t| |p_t|: eight float32 epsilons.
_ROUNDING = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Size:
    """Sizes of one example's factors; the weight is (groups * outputs, inputs) as a matrix."""

    groups: int
    positions: int
    outputs: int  # of one group
    inputs: int  # of one group
    gram: int  # multiplications for the Gram matrix of P, of all groups
    seen: int  # numbers that the layer has seen and returned

    @property
    def weight(self) -> int:
        return self.groups * self.outputs * self.inputs

    @property
    def product(self) -> int:
        """Multiplications for the gradient."""
        return self.positions * self.weight


class Factors(ABC):
    """G and P of a physical batch. ``rows`` is a range of r of its examples."""

    batch_size: int
    size: Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def left(self, rows: slice) -> Tensor:
        """G: (r, groups, positions, outputs)."""

    @abstractmethod
    def right(self, rows: slice) -> Tensor:
        """P: (r, groups, positions, inputs)."""

    def right_gram(self, rows: slice) -> Tensor:
        """P P^T: (r, groups, positions, positions) float64."""
        right = self.right(rows).double()
        return right @ right.mT

    @abstractmethod
    def bias(self, rows: slice) -> Tensor:
        """Gradients of the bias: (r, its length)."""

    @abstractmethod
    def weight(self, gradients: Tensor) -> Tensor:
        """(r, groups, outputs, inputs) as (r, *weight.shape)."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop the tensors; ``size`` and ``weight`` stay usable."""

    def total(self, weights: Tensor, unusable: Tensor) -> Tensor:
        """The sum over i of weights[i] G_i^T P_i in the weight's shape, float32."""
        size = self.size
        total = torch.zeros(size.groups, size.outputs, size.inputs, device=self.device)
        with float32_products(self.device):
            for rows in self.ranges():
                left = without(self.left(rows).float() * weights[rows, None, None, None], unusable[rows])
                right = without(self.right(rows).float(), unusable[rows])
                # (groups, r * positions, ...): one product adds up positions and examples.
                left, right = left.transpose(0, 1).flatten(1, 2), right.transpose(0, 1).flatten(1, 2)
                total.baddbmm_(left.mT, right)
        return self.weight(total.unsqueeze(0))[0]

    def ranges(self, numbers: int | None = None) -> Iterator[slice]:
        """Ranges of examples of which the intermediate results, ``numbers`` each, fit into the cache.

        Without ``numbers``, the patches and gradients count.
        """
        if numbers is None:
            numbers = self.size.groups * self.size.positions * self.size.inputs + self.size.weight
        step = examples_at_a_time(numbers, self.device)
        for start in range(0, self.batch_size, step):
            yield slice(start, min(start + step, self.batch_size))


@contextmanager
def float32_products(device: torch.device) -> Iterator[None]:
    """No TF32 on a GPU: its rounding of 2^-11 is not in the bound of the float32 sum's error."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


class Product(Contribution):
    """Per-example gradients of a layer with a weight, and a bias perhaps."""

    def __init__(self, factors: Factors, names: Mapping[str, str]) -> None:
        self._factors, self._names = factors, names
        self.way = ""
        self._gradients: Tensor | None = None
        self._norms: dict[str, Tensor] = {}
        self._bias: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names.values())

    def formed(self) -> PerExample:
        self.way = "formed"
        gradients = {}
        everything = slice(0, self._factors.batch_size)
        if "weight" in self._names:
            gradients[self._names["weight"]] = self._factors.weight(self._form_all(torch.empty))
        if "bias" in self._names:
            gradients[self._names["bias"]] = self._factors.bias(everything)
        return PerExample(gradients, self.way)

    def measure(self, workspace: Workspace) -> None:
        factors, everything = self._factors, slice(0, self._factors.batch_size)
        if "bias" in self._names:
            self._bias = factors.bias(everything)
            self._norms["bias"] = squared_norms(self._bias)
        if "weight" not in self._names:
            self.way = "formed"
            return
        self.way = kept_way(factors.size, factors.device)
        pieces = []
        if self.way == "Gram":
            pieces = [self._gram_norms(rows) for rows in self._factors.ranges(2 * factors.size.positions**2)]
        elif self.way == "formed":
            self._gradients = self._form_all(workspace.keep, pieces)
            factors.let_go()
        else:
            pieces = self._formed_norms(workspace)
        self._norms["weight"] = torch.cat(pieces)

    def squared_norms(self) -> dict[str, Tensor]:
        return {self._names[own]: norms for own, norms in self._norms.items()}

    def weighted_sum(self, weights: Weights) -> dict[str, Tensor]:
        sums = {}
        for own, name in self._names.items():
            factors = weights.factors[name]
            if own == "bias":
                assert self._bias is not None
                sums[name] = weighted_rows(self._bias, factors, weights.unusable)
            elif self._gradients is not None:
                total = weighted_rows(self._gradients, factors, weights.unusable)
                sums[name] = self._factors.weight(total.view(1, *self._gradients.shape[1:]))[0]
            else:
                sums[name] = self._factors.total(factors, weights.unusable)
        return sums

    def stream(self, weigh: Weigh, workspace: Workspace) -> dict[str, Tensor]:
        size = self._factors.size
        if "weight" not in self._names or streamed_way(size, self._factors.device) == "Gram":
            return super().stream(weigh, workspace)
        self.way = "formed and used up"
        weight, bias = self._names["weight"], self._names.get("bias")
        total, bias_total = torch.zeros(size.weight, device=self._factors.device), None
        for rows in self._factors.ranges():
            gradients = self._form(rows, self._empty(workspace.scratch, rows.stop - rows.start))
            norms = {weight: squared_norms(gradients)}
            if bias is not None:
                bias_rows = self._factors.bias(rows)
                norms[bias] = squared_norms(bias_rows)
            weights = weigh(rows, norms)
            total.addmv_(without(gradients, weights.unusable).flatten(1).float().T, weights.factors[weight])
            if bias is not None:
                piece = weighted_rows(bias_rows, weights.factors[bias], weights.unusable)
                bias_total = piece if bias_total is None else bias_total + piece
        sums = {weight: self._factors.weight(total.view(1, size.groups, size.outputs, size.inputs))[0]}
        if bias is not None and bias_total is not None:
            sums[bias] = bias_total
        return sums

    def _form(self, rows: slice, out: Tensor) -> Tensor:
        """(r, groups, outputs, inputs), written to ``out``."""
        left, right = self._factors.left(rows).flatten(0, 1), self._factors.right(rows).flatten(0, 1)
        torch.bmm(left.mT, right, out=out.flatten(0, 1))
        return out

    def _form_all(self, empty: Callable[..., Tensor], norms: list[Tensor] | None = None) -> Tensor:
        gradients = self._empty(empty, self._factors.batch_size)
        for rows in self._factors.ranges():
            formed = self._form(rows, gradients[rows])
            if norms is not None:
                norms.append(squared_norms(formed))
        return gradients

    def _formed_norms(self, workspace: Workspace) -> list[Tensor]:
        return [
            squared_norms(self._form(rows, self._empty(workspace.scratch, rows.stop - rows.start)))
            for rows in self._factors.ranges()
        ]

    def _empty(self, empty: Callable[..., Tensor], rows: int) -> Tensor:
        size, factors = self._factors.size, self._factors
        shape = (rows, size.groups, size.outputs, size.inputs)
        return empty(shape, dtype=factors.dtype, device=factors.device)

    def _gram_norms(self, rows: slice) -> Tensor:
        left = self._factors.left(rows).double()
        gram, patches = left @ left.mT, self._factors.right_gram(rows)
        diagonals = gram.diagonal(dim1=2, dim2=3) * patches.diagonal(dim1=2, dim2=3)
        rounding = _ROUNDING * diagonals.clamp_min(0.0).sqrt().sum((1, 2))
        squared = torch.linalg.vecdot(gram.flatten(1), patches.flatten(1)).clamp_min(0.0)
        return (squared + rounding.square()).float()
