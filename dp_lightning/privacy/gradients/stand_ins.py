"""Functions that vmap cannot run, written with functions that it can.

They return ``NotImplemented`` if they do not apply.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning import torch_internals
from dp_lightning.privacy.gradients.rewrites import REWRITES, multi_head_attention_forward
from dp_lightning.torch_internals import is_batched


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` with class weights and label smoothing; ``input``: (C), (N, C) or (N, C, ...)."""
    if weight is None or not label_smoothing or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point():
        return NotImplemented
    dim = min(input.dim() - 1, 1)
    log_probabilities = F.log_softmax(input, dim)
    counted = target != ignore_index
    classes = target.where(counted, 0)
    of_class = weight[classes].where(counted, 0)
    likelihood = log_probabilities.gather(dim, classes.unsqueeze(dim)).squeeze(dim) * of_class
    weights = weight.view(-1, *[1] * (input.dim() - dim - 1))
    smooth = (log_probabilities * weights).sum(dim)
    losses = -((1 - label_smoothing) * likelihood + label_smoothing / len(weight) * smooth).where(counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / of_class.sum() if reduction == "mean" else losses.sum()


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``F.gaussian_nll_loss``, without the check for negative variances, which count as ``eps``."""
    var = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp_min(eps) - var).detach()
    losses = (var.log() + (input - target).square() / var + (math.log(2 * math.pi) if full else 0.0)) / 2
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[mask] = value`` for a number, or a row that replaces each selected row."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not is_batched(index):
        return NotImplemented
    rows = tensor.dim() - index.dim()
    if isinstance(value, Tensor) and value.dim() > rows:
        return NotImplemented
    mask = index.view(*index.shape, *[1] * rows)
    if isinstance(value, Tensor):
        tensor.copy_(torch.where(mask, value.to(tensor.dtype), tensor))
    else:
        tensor.masked_fill_(mask, value)


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``F.grouped_mm`` of rows (S, in) in groups that end at ``offs``, with a matrix (in, out) for each group.

    Each matrix multiplies all rows, so the cost is multiplied by the number of groups.
    """
    if offs is None or bias is not None or out_dtype is not None or mat_a.dim() != 2 or mat_b.dim() != 3:
        return NotImplemented
    group = (torch.arange(len(mat_a), device=mat_a.device).unsqueeze(1) >= offs).sum(1, keepdim=True)
    total = mat_a.new_zeros(len(mat_a), mat_b.shape[-1])
    for number, weight in enumerate(mat_b.unbind()):
        total = total + torch.where(group == number, mat_a @ weight, 0.0)
    return total


STAND_INS: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    F.cross_entropy: cross_entropy,
    F.gaussian_nll_loss: gaussian_nll_loss,
    Tensor.__setitem__: set_item,
    F.grouped_mm: grouped_mm,
    torch_internals.grouped_mm: grouped_mm,
    **{kernel: REWRITES[kernel] for kernel in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
"""By function, as a torch function mode sees it."""
