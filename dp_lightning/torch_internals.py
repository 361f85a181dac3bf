"""Every private member of torch, numpy and Python that this package uses.

They may change with any release. Each has a public name here, and `tests/test_internals.py` uses each, so that a
missing one is noticed, and can be replaced, in one place. Those of Lightning are in `lightning_internals`.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, _tensor_str, nn
from torch._C import _functorch
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as below_transforms
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

#: The versions with which these members were tested. Those of torch exist since 2.11.
TRIED = {"torch": "2.14.1", "numpy": "2.4.6"}

__all__ = [
    "CALLED",
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
    "carriers_of_messages",
    "core",
    "global_numpy_generator",
    "gradient_of",
    "grouped_mm",
    "groups_without_names",
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
    "operations_of_groups",
    "precision_of",
    "rpc_runs",
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
"""The getter of the attribute of this name, as a function mode sees it."""

version_of: Callable[[Tensor], int] = VERSION
"""How often a tensor has been written in place."""

gradient_of: Callable[[Tensor], Tensor | None] = torch._C.TensorBase._grad.__get__  # type: ignore[union-attr]
"""``.grad``, even if a subclass overrides it."""

swap = torch._C._swap_tensor_impl
"""Swaps two tensors: every reference to one then refers to the other."""

without_torch_function = torch._C.DisableTorchFunction
"""Context manager for code that no function mode and no ``__torch_function__`` sees."""

without_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager for code that no ``__torch_function__`` of a tensor subclass sees."""

norms = torch._foreach_norm
"""The norm of each tensor of a list."""

add_all_ = torch._foreach_add_
"""``torch.Tensor.add_`` for each tensor of a list."""

lerp_all_ = torch._foreach_lerp_
"""``torch.Tensor.lerp_`` for each tensor of a list."""

grouped_mm = torch._grouped_mm
"""``F.grouped_mm`` under its older name."""


def is_view(tensor: Tensor) -> bool:
    """Whether autograd regards a tensor as a view of another one."""
    return tensor._is_view()


def storage_address(tensor: Tensor) -> int:
    """An identifier of a tensor's memory, which is the same for two tensors that share memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and other objects hold the memory of a tensor, including this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook runs when the gradient of a tensor has been computed."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def precision_of(backend: str, operation: str) -> str:
    """The precision of float32 products that is set for ``cuda``, ``mkldnn`` or ``generic``.

    Args:
        backend: one of these.
        operation: ``conv``, ``rnn``, ``matmul`` or ``all``; ``generic`` has only ``all``.
    """
    precision: str = torch._C._get_fp32_precision_getter(backend, operation)
    return precision


def has_bfloat16_on_cpu() -> bool:
    """Whether this processor multiplies matrices of bfloat16 faster than those of float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Transforms of torch.func. Inside a transform, the tensor of one example wraps the tensor of all examples.

is_batched = _functorch.is_batchedtensor
"""Whether a tensor differs between examples."""

is_wrapped = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform that is running or has ended."""

level = _functorch.maybe_current_level
"""The level of the innermost running transform; None if none is running."""

level_of = _functorch.maybe_get_level
"""The level of the transform that a tensor belongs to; -1 if there is none."""

wrapped_tensor = _functorch.get_unwrapped
"""The tensor that the tensor of one example wraps."""

batch_dimension = _functorch.maybe_get_bdim
"""The dimension of `wrapped_tensor` that is that of the examples."""

add_batch_dimension = _functorch._add_batch_dim
"""(tensor, dimension, level) to the tensor of one example inside the vmap of that level."""


def innermost_transform() -> str:
    """Name of the innermost running transform, such as vmap or grad."""
    return str(_functorch.peek_interpreter_stack().key()).rpartition(".")[2].lower()


def has_vmap_kernel(operator: OpOverload) -> bool:
    """Whether an operator has a vmap rule of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "FuncTorchBatched")


@contextmanager
def numbers_hidden() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is true, so code that checks it does not read a tensor's values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def vmap_results_seen(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note`` with the result of each vmap, which no function mode sees."""
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
    """Set the text of every tensor of a transform, in all threads."""
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


# numpy and Python

CachedFunction = functools._lru_cache_wrapper
"""The type of what ``functools.lru_cache`` makes of a function."""

ForeignThread = threading._DummyThread
"""The type of ``threading.current_thread()`` in a thread that Python has not started, such as one of autograd's."""

global_numpy_generator = np.random.mtrand._rand
"""The generator whose methods are the functions of ``numpy.random``."""


# Processes


def carriers_of_messages() -> list[type]:
    """The classes whose objects send to other processes: process groups, their backends, and stores."""
    from torch._C import _distributed_c10d as c10d  # not in every build

    found: list[type] = [c10d.ProcessGroup, c10d.Backend, c10d.Store]
    for kind in found:  # the list grows by their subclasses
        found += kind.__subclasses__()
    return found


@contextmanager
def groups_without_names() -> Iterator[None]:
    """Context in which no process group is found by its name, as functional collectives look for it."""
    from torch._C import _distributed_c10d as c10d

    groups = dict(torch.distributed.distributed_c10d._world.pg_names)
    try:
        for name in groups.values():
            c10d._unregister_process_group(name)
        yield
    finally:
        for group, name in groups.items():
            c10d._register_process_group(name, group)


def operations_of_groups() -> list[int]:
    """How many collectives and messages each process group has begun; without groups whose backend does not count."""
    groups: list[Any] = list(torch.distributed.distributed_c10d._world.pg_names)
    counts = []
    for group in groups:
        with suppress(RuntimeError):
            counts.append(group._get_sequence_number_for_group())
    return counts


def rpc_runs() -> bool:
    """Whether torch.distributed.rpc connects this process to others."""
    rpc = sys.modules.get("torch.distributed.rpc.api")
    return rpc is not None and bool(rpc._is_current_rpc_agent_set())
