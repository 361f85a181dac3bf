"""Gradients that are sums of outer products: grad W_i = sum over positions t of g_it p_it^T = G_i^T P_i.

Linear layers and convolutions are of this form: g_it is the gradient of the layer's output at position t (a token, a
pixel), p_it what the weight multiplied there (the token, the patch under the kernel). The positions of all views of an
example are positions of the example: its gradients add up in the product, and no view has one of its own. There are
two exact methods for the norms and the weighted sum over examples:

* formed: G_i^T P_i for a few examples at a time, so that patches and gradients stay in the cache.
  Each gradient is used up at once if its norm alone decides; otherwise all of them are kept until the norm over all
  layers is known.
* Gram: ||G_i^T P_i||^2 is the sum of the entrywise product of the Gram matrices G_i G_i^T and P_i P_i^T (Goodfellow
  2015; Bu et al. 2022), and the weighted sum is one product over all examples. Terms of both signs cancel in the norm,
  so it is computed in float64.

With Gram matrices, the sum is not rounded like the norm. With a bound r on the float32 rounding of an example's part of
the sum, the example contributes at most ||G_i^T P_i|| + r. This is the norm that is reported, so that an example whose
gradient cancels cannot contribute what was not measured.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.contribution import (
    Contribution,
    PerExample,
    Weigh,
    Weights,
    add_weighted,
    joined,
    part_norms,
    scaled,
    without,
)
from dp_lightning.privacy.gradients.cost_model import Size, examples_at_a_time, kept_method, streamed_method
from dp_lightning.torch_internals import storage_address


def rounding_per_term(positions: int) -> float:
    """Bound on the rounding of a float32 sum over ``positions``, relative to the sum over t of |g_t| |p_t|.

    A product and an addition round by half an epsilon each, and every addition rounds a partial sum of at most that
    size (Higham 2002, section 3.1): an example's own terms need (``positions`` + 1) / 2 epsilons. Four times that
    leaves room for other examples' terms that are added in between.
    """
    return (2 * positions + 8) * torch.finfo(torch.float32).eps


Empty = Callable[..., Tensor]
"""Like ``torch.empty``, with ``dtype`` and ``device``."""


class Scratch(threading.local):
    """Memory for what lives only until the next layer, of which each thread has its own.

    On a CPU the first touch of memory that is not in the cache costs more than computing what is written there. A GPU's
    allocator already reuses memory.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for intermediate results, valid until the next call."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._buffer.numel() < prod(shape) or self._buffer.dtype != dtype:
            self._buffer = torch.empty(prod(shape), dtype=dtype)
        return self._buffer[: prod(shape)].view(shape)


_PATCHES, _GRADIENTS = Scratch(), Scratch()


class Factors(ABC):
    """G and P of a physical batch. ``rows`` is a range of r of its examples."""

    batch_size: int  # b, in examples
    size: Size
    dtype: torch.dtype  # in which the gradients are formed
    device: torch.device
    by_products = True  # whether ``form`` multiplies matrices, or else folds examples into the groups of a convolution
    kind: Hashable = None  # equal for factors that can be joined; None for those that cannot

    def joined(self, others: Sequence[Any]) -> "Factors":
        """The factors of several layers, one after the other in the groups."""
        raise NotImplementedError

    @abstractmethod
    def left(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """G: (r, groups, positions, outputs)."""

    @abstractmethod
    def right(self, rows: slice, dtype: torch.dtype, empty: Empty = torch.empty) -> Tensor:
        """P: (r, groups, positions, inputs); a view, or in memory from ``empty``."""

    def form(self, rows: slice, empty: Empty) -> Tensor:
        """G_i^T P_i: (r, groups, outputs, inputs), in memory of its own or from ``empty``."""
        size = self.size
        shape = (rows.stop - rows.start, size.groups, size.outputs, size.inputs)
        out = empty(shape, dtype=self.dtype, device=self.device)
        left, right = self.left(rows, self.dtype), self.right(rows, self.dtype, _PATCHES)
        torch.bmm(left.flatten(0, 1).mT, right.flatten(0, 1), out=out.flatten(0, 1))
        return out

    @property
    def forming(self) -> int:
        """How many intermediate results ``form`` has for one example."""
        return self.size.patches + self.size.weight

    def right_gram(self, rows: slice) -> Tensor:
        """P P^T: (r, groups, positions, positions) float64."""
        right = self.right(rows, torch.float64)
        return right @ right.mT

    @abstractmethod
    def bias(self, rows: slice) -> Tensor:
        """Gradients of the bias: (r, its length)."""

    @abstractmethod
    def weight(self, gradients: Tensor) -> Tensor:
        """(r, groups, outputs, inputs) as (r, *weight.shape)."""

    @abstractmethod
    def rows_of(self, weight: Tensor) -> Tensor:
        """(..., *weight.shape) as (..., groups, outputs, inputs), the inverse of ``weight``."""

    @abstractmethod
    def let_go(self) -> None:
        """Drop the tensors; ``size`` and ``weight`` stay usable."""

    def add_total(self, weights: Tensor, total: Tensor) -> None:
        """Add the sum over i of weights[i] G_i^T P_i to ``total``: (groups, outputs, inputs), float32.

        Args:
            weights: (b, L) of L layers, each of which has as many groups.
            total: what is added to.
        """
        size, dtype = self.size, torch.promote_types(self.dtype, torch.float32)
        for rows in self.ranges(size.patches + size.groups * size.positions * size.outputs):
            left = scaled(self.left(rows, dtype), weights[rows])
            right = without(self.right(rows, dtype), weights[rows])
            # (groups, r * positions, ...): one product adds up positions and examples.
            left, right = left.transpose(0, 1).flatten(1, 2), right.transpose(0, 1).flatten(1, 2)
            if dtype == torch.float32:
                total.baddbmm_(left.mT, right)
            else:
                total += left.mT @ right

    def ranges(self, numbers: int) -> Iterator[slice]:
        """Ranges of examples whose intermediate results, ``numbers`` each, fit into the cache."""
        step = examples_at_a_time(numbers, self.device)
        for start in range(0, self.batch_size, step):
            yield slice(start, min(start + step, self.batch_size))


@contextmanager
def float32_products() -> Iterator[None]:
    """Use no TF32 and no bfloat16 in float32 products: the bound on the sum's error does not cover their rounding."""
    torch_backends: Any = torch.backends
    cuda, cudnn, mkldnn = torch_backends.cuda, torch_backends.cudnn, torch_backends.mkldnn
    backends = [cuda.matmul, cudnn.conv, mkldnn.matmul, mkldnn.conv]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def product(factors: Factors, names: Mapping[str, str]) -> Contribution:
    """Per-example gradients of a ``weight`` and its ``bias``, of those that have a name."""
    if "weight" in names:
        return Product(factors, names)
    return PerExample({names["bias"]: factors.bias(slice(None))})


class Product(Contribution):
    """Per-example gradients of a weight and its bias, or of those of L layers of one kind.

    Args:
        factors: the factors of all layers.
        layers: for each layer, the names of its weight and bias by ``weight`` and ``bias``, which may be missing.
    """

    def __init__(self, factors: Factors, *layers: Mapping[str, str]) -> None:
        self._factors, self._layers = factors, layers
        self.kind = factors.kind and (factors.kind, *layers[0])
        self.names = tuple(name for layer in layers for name in layer.values())
        self._weights = [layer["weight"] for layer in layers]
        self._rows: dict[str, Tensor] = {}  # of biases
        self._kept: list[Tensor] = []  # formed, of r examples each, b in all
        self._norms = torch.empty(0)  # of k parts of each weight's gradient, (b, L * k)

    def joined(self, others: Sequence["Product"]) -> "Product":
        layers = (layer for each in (self, *others) for layer in each._layers)
        return Product(self._factors.joined([each._factors for each in others]), *layers)

    def formed(self) -> PerExample:
        self._measure("formed")
        return PerExample({**self._rows, self._weights[0]: self._factors.weight(joined(self._kept))})

    def measure(self) -> None:
        self._measure(kept_method(self._factors.size))

    @property
    def grows(self) -> bool:
        size = self._factors.size
        return size.weight > size.seen and kept_method(size) == "formed"

    @property
    def rows(self) -> Mapping[str, Tensor]:
        return self._rows

    def norms(self) -> dict[str, Tensor]:
        return dict(zip(self._weights, self._by_layer(self._norms, 1), strict=True))

    def add_weighted(self, weights: Weights, sums: Mapping[str, Tensor]) -> None:
        factors, start = joined([weights[name].unsqueeze(1) for name in self._weights], dim=1), 0  # (b, L)
        with self._adding_to(sums) as total:
            if not self._kept:
                with float32_products():
                    self._factors.add_total(factors, total)
            for piece in self._kept:
                parts = factors[start : start + len(piece)].unbind(1)
                for into, part, own in zip(self._by_layer(total, 0), self._by_layer(piece, 1), parts, strict=True):
                    add_weighted(into, part, own, used_up=True)
                start += len(piece)

    def stream(self, weigh: Weigh, sums: Mapping[str, Tensor]) -> None:
        factors = self._factors
        if streamed_method(factors.size, by_products=factors.by_products) == "Gram":
            self._measure("Gram")
            self.add_measured(weigh, sums)
            return
        (names,) = self._layers
        with self._adding_to(sums) as total:
            for rows in factors.ranges(factors.forming):
                pieces = {"weight": factors.form(rows, _GRADIENTS)}
                if "bias" in names:
                    pieces["bias"] = factors.bias(rows)
                weights = weigh(rows, {names[own]: part_norms(piece) for own, piece in pieces.items()})
                for own, piece in pieces.items():
                    into = total if own == "weight" else sums[names[own]]
                    add_weighted(into, piece, weights[names[own]], used_up=True)

    @contextmanager
    def _adding_to(self, sums: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The sums of the weights as one tensor (groups, outputs, inputs); what is added to it counts."""
        totals = [sums[name] for name in self._weights]
        rows = self._factors.rows_of(totals[0])
        if len(totals) == 1 and storage_address(rows) == storage_address(totals[0]):
            yield rows
        else:  # of several layers, or of one whose input and weight have different memory formats
            rows = rows.new_zeros(self._factors.size.groups, *rows.shape[1:])
            yield rows
            for total, part in zip(totals, self._factors.weight(rows.unflatten(0, (len(totals), -1))), strict=True):
                total += part

    def _by_layer(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        return tensor.chunk(len(self._layers), dim)

    def _measure(self, method: str) -> None:
        factors, size, norms = self._factors, self._factors.size, []
        if biases := [layer["bias"] for layer in self._layers if "bias" in layer]:
            self._rows = dict(zip(biases, self._by_layer(factors.bias(slice(None)), 1), strict=True))
        if method == "Gram":
            # Two Gram matrices and what they are computed from, in float64.
            for rows in factors.ranges(2 * (2 * size.groups * size.positions**2 + size.seen)):
                norms.append(self._gram_norms(rows))
        else:
            for rows in factors.ranges(factors.forming):
                # Small pieces fit into memory that activations have just freed. Fresh memory is slow.
                self._kept.append(factors.form(rows, torch.empty))
                norms.append(joined([part_norms(part) for part in self._by_layer(self._kept[-1], 1)], dim=1))
            factors.let_go()
        self._norms = joined(norms)

    def _gram_norms(self, rows: slice) -> Tensor:
        left = self._factors.left(rows, torch.float64)
        gram, patches = left @ left.mT, self._factors.right_gram(rows)
        diagonals = gram.diagonal(dim1=2, dim2=3) * patches.diagonal(dim1=2, dim2=3)
        layer = len(self._layers), -1  # the groups of a layer are one vector
        terms = diagonals.clamp_min(0.0).sqrt().unflatten(1, layer).flatten(2).sum(2)
        squared = torch.linalg.vecdot(*(each.unflatten(1, layer).flatten(2) for each in (gram, patches)))
        rounding = rounding_per_term(self._factors.size.positions) * terms
        # The sum of two vectors is at most as long as both together.
        return squared.clamp_min(0.0).sqrt() + rounding
