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
from collections.abc import Iterator, Mapping
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
)
from dp_lightning.privacy.gradients.ways import examples_at_a_time, kept_way, streamed_way

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

    @abstractmethod
    def total(self, weights: Tensor, unusable: Tensor) -> Tensor:
        """The sum over i of weights[i] G_i^T P_i in the weight's shape, float32, in one product."""


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
            gradients[self._names["weight"]] = self._factors.weight(self._form_all())
        if "bias" in self._names:
            gradients[self._names["bias"]] = self._factors.bias(everything)
        return PerExample(gradients, self.way)

    def measure(self) -> None:
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
            pieces = [self._gram_norms(rows) for rows in self._ranges(2 * factors.size.positions**2)]
        elif self.way == "formed":
            self._gradients = self._form_all(pieces)
            factors.let_go()
        else:
            buffer = self._buffer(self._step())
            pieces = [squared_norms(self._form(rows, buffer)) for rows in self._ranges()]
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

    def stream(self, weigh: Weigh) -> dict[str, Tensor]:
        size = self._factors.size
        if "weight" not in self._names or streamed_way(size, self._factors.device) == "Gram":
            return super().stream(weigh)
        self.way = "formed and used up"
        own_names = self._names
        buffer = self._buffer(self._step())
        total = torch.zeros(size.weight, dtype=torch.float32, device=self._factors.device)
        bias_total = torch.zeros(0)
        for rows in self._ranges():
            gradients = self._form(rows, buffer)
            norms = {own_names["weight"]: squared_norms(gradients)}
            if "bias" in own_names:
                bias = self._factors.bias(rows)
                norms[own_names["bias"]] = squared_norms(bias)
            weights = weigh(rows, norms)
            total += weighted_rows(gradients, weights.factors[own_names["weight"]], weights.unusable)
            if "bias" in own_names:
                piece = weighted_rows(bias, weights.factors[own_names["bias"]], weights.unusable)
                bias_total = bias_total + piece if bias_total.numel() else piece
        sums = {own_names["weight"]: self._factors.weight(total.view(1, size.groups, size.outputs, size.inputs))[0]}
        if "bias" in own_names:
            sums[own_names["bias"]] = bias_total
        return sums

    def _form(self, rows: slice, buffer: Tensor) -> Tensor:
        """(r, groups, outputs, inputs), in ``buffer``."""
        left, right = self._factors.left(rows), self._factors.right(rows)
        r, out = left.shape[0], buffer[: left.shape[0]]
        if left.shape[1] == 1:
            torch.bmm(left[:, 0].mT, right[:, 0], out=out[:, 0])
        else:
            flat = out.view(r * out.shape[1], *out.shape[2:])
            torch.bmm(left.flatten(0, 1).mT, right.flatten(0, 1), out=flat)
        return out

    def _form_all(self, norms: list[Tensor] | None = None) -> Tensor:
        gradients = self._buffer(self._factors.batch_size)
        for rows in self._ranges():
            formed = self._form(rows, gradients[rows])
            if norms is not None:
                norms.append(squared_norms(formed))
        return gradients

    def _buffer(self, rows: int) -> Tensor:
        size, factors = self._factors.size, self._factors
        return torch.empty(rows, size.groups, size.outputs, size.inputs, dtype=factors.dtype, device=factors.device)

    def _gram_norms(self, rows: slice) -> Tensor:
        left = self._factors.left(rows).double()
        gram, patches = left @ left.mT, self._factors.right_gram(rows)
        diagonals = gram.diagonal(dim1=2, dim2=3) * patches.diagonal(dim1=2, dim2=3)
        rounding = _ROUNDING * diagonals.clamp_min(0.0).sqrt().sum((1, 2))
        squared = torch.linalg.vecdot(gram.flatten(1), patches.flatten(1)).clamp_min(0.0)
        return (squared + rounding.square()).float()

    def _step(self) -> int:
        size = self._factors.size
        numbers = size.groups * size.positions * size.inputs + size.weight
        return min(self._factors.batch_size, examples_at_a_time(numbers, self._factors.device))

    def _ranges(self, numbers: int | None = None) -> Iterator[slice]:
        """Ranges of examples whose intermediate results fit into the cache."""
        step = self._step() if numbers is None else examples_at_a_time(numbers, self._factors.device)
        for start in range(0, self._factors.batch_size, step):
            yield slice(start, min(start + step, self._factors.batch_size))
