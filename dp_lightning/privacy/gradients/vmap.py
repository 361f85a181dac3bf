"""Converts between a tensor of one example and the tensor of all examples behind it.

Inside ``torch.func.vmap``, a tensor of one example wraps the tensor of all examples, whose example dimension may be at
any position. Autograd runs below the wrappers, so the graph, its hooks and its gradients are those of all examples.
"""

import torch
from torch import Tensor

from dp_lightning.torch_internals import (
    add_batch_dimension,
    batch_dimension,
    below_transforms,
    is_batched,
    level,
    wrapped_tensor,
)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor of all examples (b, ...) behind a batched one; to be used in ``below_transforms``."""
    inner, dim = wrapped_tensor(tensor), batch_dimension(tensor)
    if dim == 0:
        return inner
    with below_transforms():
        return torch.movedim(inner, dim, 0)


def wrapped(tensor: Tensor, at: int) -> Tensor:
    """A tensor of all examples (b, ...) as that of one example, inside the vmap of level ``at``."""
    return add_batch_dimension(tensor, 0, at)


def detached(tensor: Tensor, batch_size: int) -> Tensor:
    """The tensor of all examples (b, ...) behind that of one example, detached."""
    if level() is None:
        return tensor.detach().expand(batch_size, *tensor.shape)
    inner = unwrapped(tensor) if is_batched(tensor) else tensor.expand(batch_size, *tensor.shape)
    with below_transforms():
        return inner.detach()
