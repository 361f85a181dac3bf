"""Every private member of torch, numpy and Python that this package uses.

They may change with any release. Each has a public name here, and `tests/test_internals.py` uses each, so that a
missing one is noticed, and can be replaced, in one place. Those of Lightning are in `lightning_internals`.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, _tensor_str, nn
from torch._C import _functorch
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as below_transforms
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

#: The versions with which these members were tried. Those of torch are there from 2.11 on.
TRIED = {"torch": "2.14.1", "numpy": "2.4.6"}

__all__ = [
    "CALLED",
    "EXTRA_STATE",
    "GRAD_FN",
    "MODULE_MEMBERS",
    "PARAMETERS",
    "REQUIRES_GRAD",
    "TRIED",
    "VERSION",
    "BatchNorm",
    "CachedFunction",
    "ForeignThread",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TreeSpec",
    "add_batch_dimension",
    "batch_dimension",
    "below_transforms",
    "core",
    "global_numpy_generator",
    "gradient_of",
    "grouped_mm",
    "has_bfloat16_on_cpu",
    "has_hooks",
    "has_vmap_kernel",
    "innermost_transform",
    "is_batched",
    "is_compiled",
    "is_view",
    "is_wrapped",
    "lerp_all_",
    "level",
    "level_of",
    "norms",
    "numbers_hidden",
    "parts_of_schedule",
    "storage_address",
    "storage_uses",
    "swap",
    "text_of_wrapped",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "vmap_results_seen",
    "without_torch_function",
    "without_torch_function_of_subclasses",
    "wrapped_tensor",
]

# Tensors

core = torch._C
"""The module of torch's functions in C++."""

GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
VERSION = vars(torch._C.TensorBase)["_version"].__get__
"""Of the attribute of this name, as a function mode sees it when it is read."""

version_of: Callable[[Tensor], int] = VERSION
"""How often a tensor has been written in place."""

gradient_of: Callable[[Tensor], Tensor | None] = torch._C.TensorBase._grad.__get__  # type: ignore[union-attr]
"""``.grad``, whatever a subclass makes of it."""

swap = torch._C._swap_tensor_impl
"""Two tensors change places: whoever refers to one has the other."""

without_torch_function = torch._C.DisableTorchFunction
"""Around code that no function mode and no ``__torch_function__`` sees."""

without_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
"""Around code that no ``__torch_function__`` of a tensor subclass sees."""

norms = torch._foreach_norm
"""Of each tensor of a list."""

lerp_all_ = torch._foreach_lerp_
"""``torch.Tensor.lerp_`` of each tensor of a list."""

grouped_mm = torch._grouped_mm
"""``F.grouped_mm`` by its older name."""


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return tensor._is_view()


def storage_address(tensor: Tensor) -> int:
    """By which the memory of a tensor is known; two tensors that share memory have the same."""
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and other objects hold the memory of a tensor, this look at it included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs when the gradient of a tensor is there."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_bfloat16_on_cpu() -> bool:
    """Whether this processor multiplies matrices of bfloat16 faster than those of float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Transforms of torch.func. Inside of one a tensor of one example wraps the tensor of all examples.

is_batched = _functorch.is_batchedtensor
"""Whether a tensor differs between examples."""

is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor is of a transform that runs or has ended."""

level = _functorch.maybe_current_level
"""Of the innermost transform that runs; None outside of all."""

level_of = _functorch.maybe_get_level
"""Of the transform that a tensor belongs to; -1 outside of all."""

wrapped_tensor = _functorch.get_unwrapped
"""What a tensor of one example wraps."""

batch_dimension = _functorch.maybe_get_bdim
"""Which dimension of `wrapped_tensor` is that of examples."""

add_batch_dimension = _functorch._add_batch_dim
"""(tensor, dimension, level) to the tensor of one example inside of the vmap of that level."""


def innermost_transform() -> str:
    """Name of the innermost transform that runs, such as vmap or grad."""
    return str(_functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()


def has_vmap_kernel(operator: OpOverload) -> bool:
    """Whether an operator has a vmap of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "FuncTorchBatched")


@contextmanager
def numbers_hidden() -> Iterator[None]:
    """Inside, code that checks ``torch.compiler.is_compiling()`` before it reads a tensor's values does not."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def vmap_results_seen(note: Callable[[Any], None]) -> Iterator[None]:
    """``note`` gets what each vmap returns, which no function mode sees."""
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


@contextmanager
def text_of_wrapped(text: str) -> Iterator[None]:
    """The text of a tensor of a transform, in whatever thread."""
    before = _tensor_str._functorch_wrapper_str_intern
    _tensor_str._functorch_wrapper_str_intern = lambda tensor, **kwargs: text
    try:
        yield
    finally:
        _tensor_str._functorch_wrapper_str_intern = before


# Modules, optimizers and schedules

PARAMETERS = "_parameters"
MODULE_MEMBERS = (PARAMETERS, "_buffers", "_modules")
"""Attributes of a module that hold its parameters, buffers and modules by name."""

CALLED = "_opt_called"
"""Attribute that a schedule sets in its optimizer when a step begins."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile`` was called, or the module was made by ``torch.compile``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def parts_of_schedule(schedule: Any) -> list[Any]:
    """The schedules and functions that a learning rate schedule of torch calls."""
    parts = [*getattr(schedule, "_schedulers", ()), *getattr(schedule, "lr_lambdas", ())]
    return [*parts, getattr(schedule, "_scale_fn_custom", None)]


# numpy and Python

CachedFunction = functools._lru_cache_wrapper
"""What ``functools.lru_cache`` makes of a function."""

ForeignThread = threading._DummyThread
"""``threading.current_thread()`` in a thread that Python has not started, such as one of autograd's."""

global_numpy_generator = np.random.mtrand._rand
"""Whose methods are the functions of ``numpy.random``."""
