"""Every private member of torch that this package uses.

They may change with any release. Each has a public name here and the reason why it is needed, and
`tests/test_internals.py` uses each, so that a missing one is noticed, and can be replaced, in one place. Those of
Lightning are in `lightning_internals`.
"""

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.utils import _pytree

#: The versions with which these members were tested. Those of torch exist since 2.11.
TRIED = {"torch": "2.14.1"}

# Tensors


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written in place: what a rule has seen must still be there in the backward pass."""
    return tensor._version


def storage_address(tensor: Tensor) -> int:
    """An identifier of a tensor's memory: a buffer that is written may be reached through any view of it.

    Unlike the public ``data_ptr``, it tells tensors on the meta device and empty ones apart.
    """
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and other objects, such as arrays of NumPy, hold the memory of a tensor, including this call.

    A shared tensor becomes one per example only where nothing else sees its memory.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook would run when the gradient of a parameter has been computed, which a private step never does."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_bfloat16_on_cpu() -> bool:
    """Whether this processor multiplies matrices of bfloat16 faster than those of float32, which chooses methods."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Transforms of torch.func. Inside a transform, the tensor of one example wraps the tensor of all examples, which may
# have the dimension of the examples anywhere. Rules run on the latter, `below_transforms`, and put it back into a
# wrapper; torch.func itself shows neither. Autograd runs below the wrappers, so the graph, its hooks and its gradients
# are those of all examples.

below_transforms = pyfunctorch.temporarily_pop_interpreter_stack
"""A context in which no transform runs."""

is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform that is running or has ended, so that it may hold an example."""

level = _functorch.maybe_current_level
"""The level of the innermost running transform, by which inner transforms are told; None if none is running."""

wrapped_tensor = _functorch.get_unwrapped
"""The tensor that the tensor of one example wraps."""

batch_dimension = _functorch.maybe_get_bdim
"""The dimension of `wrapped_tensor` that is that of the examples; -1 if the tensor does not differ between them."""


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor differs between examples."""
    return batch_dimension(tensor) >= 0


def wrapped(tensor: Tensor, at: int) -> Tensor:
    """A tensor of all examples (b, ...) as that of one example, inside the vmap of level ``at``."""
    return _functorch._add_batch_dim(tensor, 0, at)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor of all examples (b, ...) behind a batched one; to be used in ``below_transforms``."""
    inner, dim = wrapped_tensor(tensor), batch_dimension(tensor)
    if dim == 0:
        return inner
    with below_transforms():
        return torch.movedim(inner, dim, 0)


def detached(tensor: Tensor, batch_size: int) -> Tensor:
    """The tensor of all examples (b, ...) behind that of one example, detached."""
    if level() is None:
        return tensor.detach().expand(batch_size, *tensor.shape)
    inner = unwrapped(tensor) if is_batched(tensor) else tensor.expand(batch_size, *tensor.shape)
    with below_transforms():
        return inner.detach()


# Modules, and trees of tensors, for which torch 2.14 has no public functions

TreeSpec = _pytree.TreeSpec
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile`` was called, or the module was made by ``torch.compile``: no mode sees inside it."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
