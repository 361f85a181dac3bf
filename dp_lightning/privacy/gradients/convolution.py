"""Convolutions in one, two and three dimensions, with stride, padding, dilation and groups.

Two exact ways, chosen by size:

* formed: the weight gradients of all examples are one grouped convolution with the batch folded into the groups;
* factored: with patches P_i (positions x inputs) and output gradients g_i (positions x outputs) the weight gradient is
  g_i^T P_i, and ||g_i^T P_i||^2 is the sum of the entrywise product of the Gram matrices P_i P_i^T and g_i g_i^T
  (Goodfellow 2015; Bu et al. 2022). For stride 1 the Gram matrix of the patches is the sum of k^2 shifted windows of
  the Gram matrix of the padded input over its positions, so that no patch is ever formed. Terms of both signs cancel
  in that sum, so it is taken in float64. The weighted sum is the ordinary weight gradient of the weighted output
  gradients, in float32; a bound of its rounding error is added to the norm.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from dp_lightning.privacy.gradients.contribution import Contribution

# Factored costs two Gram matrices of T x T for T positions, formed costs a gradient per example; measured on
# WRN-16-4 the ways meet near T^2 = half of the weight's size. Below a quarter of it factored is clearly faster.
_FACTORED_BELOW = 0.25
# Rounding of the float32 weighted sum, relative to the sum over positions of |g_t| |P_t|: eight float32 epsilons.
_ROUNDING = 8 * torch.finfo(torch.float32).eps


class ConvolutionRule:
    """Rule of ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with zero padding, and of their other padding modes."""

    def per_example(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        conv = cast(_ConvNd, module)
        gradients = {}
        if "weight" in wanted:
            x, padding = _padded(conv, inputs.to(grad_output.dtype))
            b, (outputs, *kernel) = x.shape[0], conv.weight.shape
            folded = _weight_gradient(
                conv,
                x.reshape(1, -1, *x.shape[2:]),
                grad_output.reshape(1, -1, *grad_output.shape[2:]),
                padding,
                weight=grad_output.new_empty(b * outputs, *kernel),
                groups=b * conv.groups,
            )
            gradients["weight"] = folded.view(b, *conv.weight.shape)
        if "bias" in wanted:
            gradients["bias"] = grad_output.flatten(2).sum(2)
        return gradients

    def factored(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]
    ) -> Contribution | None:
        conv = cast(_ConvNd, module)
        positions = grad_output[0, 0].numel()
        if "weight" not in names or not isinstance(conv, nn.Conv2d) or conv.groups != 1:
            return None
        # On a GPU convolutions may run in TF32, so the sum would not be what was measured.
        if inputs.device.type != "cpu" or positions**2 > _FACTORED_BELOW * conv.weight.numel():
            return None
        x, padding = _padded(conv, inputs.float())
        return _Factored(conv, names, x, grad_output.float(), padding)


def _padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the symmetric zero padding that is left to apply to it."""
    if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
        return x, tuple(conv.padding)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, conv._reversed_padding_repeated_twice, mode=mode), (0,) * len(conv.kernel_size)


def _weight_gradient(
    conv: _ConvNd, x: Tensor, g: Tensor, padding: tuple[int, ...], *, weight: Tensor, groups: int
) -> Tensor:
    """The sum over the leading dimension of the weight gradients; ``weight`` lends its shape alone."""
    return torch.ops.aten.convolution_backward(
        g,
        x,
        weight,
        None,
        conv.stride,
        padding,
        conv.dilation,
        False,
        [0] * len(padding),
        groups,
        [False, True, False],
    )[1]


class _Factored(Contribution):
    """Gradients g_i^T P_i of a 2-d convolution, by Gram matrices over positions."""

    def __init__(
        self, conv: nn.Conv2d, names: Mapping[str, str], x: Tensor, g: Tensor, padding: tuple[int, ...]
    ) -> None:
        self.conv, self.names, self.x, self.g, self.padding = conv, names, x, g, padding

    def squared_norms(self) -> dict[str, Tensor]:
        flat = self.g.double().flatten(2)
        gram = torch.bmm(flat.transpose(1, 2), flat)  # (b, T, T)
        patches = self._patch_gram()
        diagonals = gram.diagonal(dim1=1, dim2=2) * patches.diagonal(dim1=1, dim2=2)
        rounding = _ROUNDING * diagonals.clamp_min(0.0).sqrt().sum(1)
        squared = gram.mul_(patches).sum((1, 2)).clamp_min(0.0)
        norms = {"weight": (squared + rounding.square()).float()}
        if "bias" in self.names:
            norms["bias"] = self.g.sum((2, 3)).square().sum(1)
        return {name: norms[own] for own, name in self.names.items()}

    def _patch_gram(self) -> Tensor:
        """(b, T, T) inner products of the patches under the kernel, float64."""
        conv = self.conv
        height, width = self.g.shape[2:]
        if conv.stride != (1, 1):
            patches = F.unfold(
                self.x.double(), conv.kernel_size, dilation=conv.dilation, padding=self.padding, stride=conv.stride
            )
            return torch.bmm(patches.transpose(1, 2), patches)
        x = F.pad(self.x.double(), (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        flat = x.flatten(2)
        gram = torch.bmm(flat.transpose(1, 2), flat).view(x.shape[0], *x.shape[2:], *x.shape[2:])
        total = gram.new_zeros(x.shape[0], height, width, height, width)
        for i in range(conv.kernel_size[0]):
            rows = slice(i * conv.dilation[0], i * conv.dilation[0] + height)
            for j in range(conv.kernel_size[1]):
                columns = slice(j * conv.dilation[1], j * conv.dilation[1] + width)
                total += gram[:, rows, columns, rows, columns]
        return total.view(x.shape[0], height * width, height * width)

    def discard(self, rows: Tensor) -> None:
        rows = rows[:, None, None, None]
        self.x, self.g = self.x.masked_fill(rows, 0.0), self.g.masked_fill(rows, 0.0)

    def weighted_sum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sums = {}
        for own, name in self.names.items():
            weighted = self.g * weights[name][:, None, None, None]
            if own == "weight":
                shape = self.g.new_empty(self.conv.weight.shape)
                sums[name] = _weight_gradient(self.conv, self.x, weighted, self.padding, weight=shape, groups=1)
            else:
                sums[name] = weighted.sum((0, 2, 3))
        return sums
