"""Normalisation within one example: grad gamma_i is the sum of g_i * x_hat_i, grad beta_i the sum of g_i."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GroupNormRule:
    """Rule of ``nn.GroupNorm``: the batch is folded into the groups of one fused backward call."""

    def per_example(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        norm = cast(nn.GroupNorm, module)
        b, channels = inputs.shape[:2]
        dtype = torch.promote_types(inputs.dtype, grad_output.dtype)
        x = inputs.to(dtype).contiguous().view(1, b * channels, -1)
        g = grad_output.to(dtype).contiguous().view(1, b * channels, -1)
        size, groups = x.shape[2], b * norm.num_groups
        _, mean, rstd = torch.native_group_norm(x, None, None, 1, b * channels, size, groups, norm.eps)
        _, gamma, beta = torch.ops.aten.native_group_norm_backward(
            g, x, mean, rstd, None, 1, b * channels, size, groups, [False, True, True]
        )
        gradients = {"weight": gamma.view(b, channels), "bias": beta.view(b, channels)}
        return {name: gradients[name] for name in wanted}

    def factored(self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]) -> None:
        return None


class LayerNormRule:
    """Rule of ``nn.LayerNorm``: sums over the dimensions between the batch and the normalised shape."""

    def per_example(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        norm = cast(nn.LayerNorm, module)
        dims = tuple(range(1, inputs.dim() - len(norm.normalized_shape)))
        gradients = {}
        if "weight" in wanted:
            normalized = F.layer_norm(inputs.float(), norm.normalized_shape, eps=norm.eps)
            gradients["weight"] = _sum(grad_output * normalized, dims)
        if "bias" in wanted:
            gradients["bias"] = _sum(grad_output.float(), dims)
        return gradients

    def factored(self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]) -> None:
        return None


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``tensor.sum(())`` would sum everything."""
    return tensor.sum(dims) if dims else tensor
