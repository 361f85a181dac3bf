"""The members of torch's vmap that have no public name, tried with torch 2.11 to 2.14.

Inside of ``torch.func.vmap`` a tensor of one example wraps the tensor of all examples, whose example dimension may
stand anywhere. Autograd runs below the wrappers, so the graph, its hooks and its gradients are those of all examples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as below

__all__ = [
    "become",
    "below",
    "detached",
    "hidden_numbers",
    "innermost",
    "is_batched",
    "level",
    "level_of",
    "seen_results",
    "unwrapped",
    "wrapped",
]

is_batched = _functorch.is_batchedtensor
"""Whether a tensor differs between examples."""

level = _functorch.maybe_current_level
"""Of the innermost transform of torch.func that runs; None outside of all."""


level_of = _functorch.maybe_get_level
"""Of the transform that a tensor belongs to; -1 outside of all."""


become = torch._C._swap_tensor_impl
"""Two tensors change places: whoever refers to one has the other."""


def innermost() -> str:
    """Name of the innermost transform that runs, such as vmap or grad."""
    return str(_functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor of all examples (b, ...) behind a batched one; to be used ``below``."""
    inner, dim = _functorch.get_unwrapped(tensor), _functorch.maybe_get_bdim(tensor)
    if dim == 0:
        return inner
    with below():
        return torch.movedim(inner, dim, 0)


def wrapped(tensor: Tensor, at: int) -> Tensor:
    """A tensor of all examples (b, ...) as that of one example, inside of the vmap of level ``at``."""
    return _functorch._add_batch_dim(tensor, 0, at)


@contextmanager
def hidden_numbers() -> Iterator[None]:
    """Code that asks ``torch.compiler.is_compiling()`` before it reads the numbers of a tensor does not read them.

    Libraries have shortcuts for special numbers, such as a mask without zeros, and leave them out where numbers cannot
    be read, as under vmap.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def detached(tensor: Tensor, batch_size: int) -> Tensor:
    """What all examples have in the place of one example's tensor, (b, ...), without gradient, unseen by any mode."""
    with torch._C.DisableTorchFunction():
        if level() is None:
            return tensor.detach().expand(batch_size, *tensor.shape)
        inner = unwrapped(tensor) if is_batched(tensor) else None
        with below():
            return tensor.detach().expand(batch_size, *tensor.shape) if inner is None else inner.detach()


@contextmanager
def seen_results(note: Callable[[Any], None]) -> Iterator[None]:
    """``note`` gets what a vmap inside of the step returns, which no function mode sees."""
    unwrap = _vmap._unwrap_batched

    def seen(*args: Any) -> Any:
        result = unwrap(*args)
        note(result)
        return result

    _vmap._unwrap_batched = seen  # type: ignore[assignment]
    try:
        yield
    finally:
        _vmap._unwrap_batched = unwrap
