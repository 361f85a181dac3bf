"""Normalisation within one example: grad gamma_i is the sum of g_i * x_hat_i, grad beta_i the sum of g_i.

The sums run over everything that shares an entry of gamma: the positions of a channel, or the tokens.

The groups of a GroupNorm know nothing of each other. So n rows of C channels are one row of n * C channels, each with a
scale and a shift of its own, and the backward pass of the ordinary GroupNorm, which takes the sums for each channel
anyway, has the gradients of each example among its results.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dp_lightning.privacy.gradients.contribution import Call, Contribution, PerExample, sum_of_views
from dp_lightning.privacy.gradients.cost_model import examples_at_a_time

# The most blocks that a GPU has in its second dimension; GroupNorm uses one for each group.
_MOST_GROUPS = 2**16 - 1

Normalize = Callable[[Tensor, Call], Tensor]
"""The function's own normalisation of rows without scale and shift, in memory of its own."""


class NormRule:
    """Gradients of a scale ``weight`` and a shift ``bias``.

    Args:
        normalize: maps rows (r, ...) to the normalised ones.
        channels: whether scale and shift belong to dimension 1 (GroupNorm), or to the last dimensions,
            which have the scale's shape (LayerNorm).
    """

    def __init__(self, normalize: Normalize, *, channels: bool) -> None:
        self._normalize, self._channels = normalize, channels

    def __call__(self, call: Call, gradient: Tensor) -> Contribution:
        inputs, names = call.inputs, call.names
        own_dims = 1 if self._channels else len(call.arguments["normalized_shape"])
        dims = tuple(range(2, inputs.dim())) if self._channels else tuple(range(1, inputs.dim() - own_dims))
        found: dict[str, list[Tensor]] = {own: [] for own in names}
        step = examples_at_a_time(3 * inputs[0].numel(), inputs.device)
        for x, g in zip(inputs.split(step), gradient.split(step), strict=True):
            g = g.to(torch.promote_types(g.dtype, torch.float32))
            if "weight" in names:
                found["weight"].append(_sum(self._normalize(x.to(g.dtype), call).mul_(g), dims))
            if "bias" in names:
                found["bias"].append(_sum(g, dims))
        rows = {name: found[own][0] if len(found[own]) == 1 else torch.cat(found[own]) for own, name in names.items()}
        return PerExample({name: sum_of_views(row, call.rows) for name, row in rows.items()})


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over ``dims``; ``tensor.sum(())`` would sum everything."""
    return tensor.sum(dims) if dims else tensor


def group_norm(rows: Tensor, call: Call) -> Tensor:
    """The rows, normalised over groups of channels."""
    return F.group_norm(rows, call.arguments["num_groups"], eps=call.arguments.get("eps", 1e-5))


def folded_group_norm(rows: Tensor, arguments: Mapping[str, Any], for_each_row: Callable[[str], Tensor]) -> Tensor:
    """GroupNorm of rows (n, C, ...) that are one row of more channels without a copy; weights are (n, C)."""
    groups, eps = len(rows) * arguments["num_groups"], arguments.get("eps", 1e-5)
    if not rows.is_contiguous() or groups > _MOST_GROUPS:
        return NotImplemented
    weights = {own: for_each_row(own).flatten() for own in ("weight", "bias") if arguments.get(own) is not None}
    return F.group_norm(rows.flatten(0, 1).unsqueeze(0), groups, **weights, eps=eps).view(rows.shape)


def layer_norm(rows: Tensor, call: Call) -> Tensor:
    """The rows, normalised over the last dimensions."""
    return F.layer_norm(rows, call.arguments["normalized_shape"], eps=call.arguments.get("eps", 1e-5))


class ContiguousBatchNorm(TorchFunctionMode):
    """Makes input and gradient of BatchNorm contiguous, for the code that runs within.

    In evaluation mode, the backward pass of torch 2.14.1 is wrong where one of the two is transposed and images are one
    pixel wide or high.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.batch_norm:
            return function(*args, **(kwargs or {}))
        result = F.batch_norm(args[0].contiguous(), *args[1:], **(kwargs or {}))
        if result.requires_grad:
            result.register_hook(Tensor.contiguous)
        return result
