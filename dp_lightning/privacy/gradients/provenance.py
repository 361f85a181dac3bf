"""Where the tensors of a physical batch come from.

What escapes may not come back: a tensor of an example that was kept from an earlier physical batch still looks like one
of this batch, since vmap numbers its levels from 1 each time. Every other tensor may be used: parameters, buffers,
constants, and what the step computes.

Writing into a buffer is allowed if what is written comes from weights alone; vmap refuses other writes. The value
before the first such write is kept, since all physical batches of a logical batch start from the same state.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.functions import collect, name_of, writes
from dp_lightning.torch_internals import is_batched, is_wrapped, storage_address, storage_uses, wrapped_tensor

Stale = Mapping[int, "weakref.ref[Tensor]"]
"""Tensors of examples from earlier physical batches, by id."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Provenance:
    """The tensors of one run of a step.

    Args:
        parameters: trained parameters by name.
        stale: tensors of examples that were made in earlier physical batches and were alive at their end.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stale: Stale) -> None:
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._stale = stale
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._outside: dict[int, Tensor] = {}  # buffers and constants that were used
        #: For each storage that was written to: a tensor over the whole storage, and its value before.
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def add_made(self, result: Any) -> None:
        """Add the tensors in the result of a function to those that this step has made."""
        if isinstance(result, Tensor):
            key = id(result)
            if key not in self._outside and key not in self._parameters:
                self._made[key] = weakref.ref(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                self.add_made(part)

    def require_of_this_batch(self, tensor: Tensor) -> None:
        """Refuse an argument of a function that belongs to an earlier physical batch.

        A tensor that the step has not been seen to make, such as the result of a scripted function or of an inner vmap,
        counts as made in this step if it belongs to an example.

        Raises:
            ModelError: if the tensor, or the tensor in it that an inner transform wraps, belongs to an earlier batch.
        """
        if self._stale:
            self._require_not_stale(tensor)
        key = id(tensor)
        if key in self._parameters or self._is_made(tensor) or key in self._outside:
            return
        if is_wrapped(tensor):
            self._made[key] = weakref.ref(tensor)
        else:
            self._outside[key] = tensor

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the value of each tensor that a function is about to write to.

        Raises:
            ModelError: if the function writes to a trained parameter.
        """
        targets: list[Tensor] = []
        if writes(func):
            collect(args[:1], targets)
        if "out" in kwargs:
            collect((kwargs["out"],), targets)
        for target in targets:
            if not is_wrapped(target) and not _sets_same_data(func, args):
                self._keep(target, func)

    def is_only_here(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this step and nothing else refers to its memory."""
        return (
            self._is_made(tensor)
            and not tensor.requires_grad
            and storage_uses(tensor) == 2  # the tensor, and this check
        )

    def swap(self, tensor: Tensor, other: Tensor) -> None:
        """Let every reference to a tensor of this step refer to another one."""
        del self._made[id(tensor)]  # weak references would be in the way
        torch.utils.swap_tensors(tensor, other)
        self.add_made(tensor)

    def living(self) -> list[Tensor]:
        """Tensors of examples that the step has made and that are still referenced."""
        made = (ref() for ref in self._made.values())
        return [tensor for tensor in made if tensor is not None and _is_of_an_example(tensor)]

    def _is_made(self, tensor: Tensor) -> bool:
        known = self._made.get(id(tensor))
        return known is not None and known() is tensor  # another tensor may have had this id

    def _require_not_stale(self, tensor: Tensor) -> None:
        while True:
            known = self._stale.get(id(tensor))
            if known is not None and known() is tensor:
                raise ModelError(
                    f"training_step uses a tensor of shape {tuple(tensor.shape)} of an earlier batch, which holds "
                    "other examples. Keep no tensor of an example in the program, such as a queue of features: "
                    "overwrite what is kept before it is read, and report numbers with self.log."
                )
            if not is_wrapped(tensor):
                return
            tensor = wrapped_tensor(tensor)

    def _keep(self, target: Tensor, func: Any) -> None:
        storage = storage_address(target)
        for name, parameter in self._parameters.values():
            if storage_address(parameter) == storage:
                raise ModelError(
                    f"training_step changes the parameter '{name}' in place ({name_of(func)}). Only the optimizer "
                    "changes parameters."
                )
        if func == _SET_DATA:  # the tensor gets another storage
            self.written.setdefault(id(target), (target, target.detach().clone()))
        elif storage not in self.written and any(
            storage_address(tensor) == storage for tensor in self._outside.values()
        ):
            whole = torch.empty(0, dtype=target.dtype, device=target.device).set_(target.untyped_storage())
            self.written[storage] = (whole, whole.clone())


def _sets_same_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function sets the ``data`` of a tensor to the values that it has."""
    if func != _SET_DATA:
        return False
    tensor, data = args
    same_kind = (tensor.shape, tensor.dtype, tensor.device) == (data.shape, data.dtype, data.device)
    return same_kind and torch.equal(tensor, data)


def _is_of_an_example(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = wrapped_tensor(tensor)
    return False
