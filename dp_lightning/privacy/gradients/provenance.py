"""Where the tensors of a step come from.

A step may use parameters, buffers, constants from before the fit, and what it computes from these and its example.
Any other tensor may hold another example: a tensor of an earlier batch still looks like one of this batch.

Writing into a buffer is allowed if what is written comes from weights alone; vmap refuses other writes. The value
before the first such write is kept, since all physical batches of a logical batch start from the same state.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.functions import collect, name_of, writes
from dp_lightning.torch_internals import is_batched, storage_address, storage_uses

Constants = Callable[[Tensor], bool]
"""Whether a tensor that does not belong to the examples existed before the fit."""


class Provenance:
    """The tensors of one run of a step.

    Args:
        parameters: trained ones by name.
        constants: whether a tensor existed before the fit; None allows every tensor that does not belong to examples.
    """

    def __init__(self, parameters: Mapping[str, Tensor], constants: Constants | None) -> None:
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._constants = constants
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._outside: dict[int, Tensor] = {}  # constants that were used
        #: By each storage that was written to: a tensor over all of it, and its value before.
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def note(self, result: Any) -> None:
        """Note that the tensors in the result of a function belong to this step."""
        if isinstance(result, Tensor):
            key = id(result)
            if key not in self._outside and key not in self._parameters:
                self._refs[key] = weakref.ref(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                self.note(part)

    def require(self, tensor: Tensor, batched: bool) -> None:
        """Refuse a tensor that does not belong to this step.

        Raises:
            ModelError: with its shape.
        """
        key = id(tensor)
        if self._is_made(tensor) or key in self._parameters or key in self._outside:
            return
        if batched:
            raise ModelError(
                f"training_step uses a tensor of shape {tuple(tensor.shape)} of an earlier batch, or one that does "
                "not come from torch's functions, such as one from a scripted function or a tensor subclass. Keep no "
                "tensor of an example in the program; the environment variable PYTORCH_JIT=0 leaves functions "
                "unscripted."
            )
        if self._constants is not None and not self._constants(tensor):
            raise ModelError(
                f"training_step uses a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} that is not a "
                "parameter or a buffer and was not made in this step, so it may hold other examples. If it holds "
                "nothing of the training data, make it a buffer of the module (register_buffer), or write "
                "torch.tensor(...) for torch.Tensor(...), torch.FloatTensor(...) or torch.from_numpy(...)."
            )
        self._outside[key] = tensor

    def before(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the value of what a function is about to write to.

        Raises:
            ModelError: if that is a trained parameter.
        """
        targets: list[Tensor] = []
        if writes(func):
            collect(args[:1], targets)
        if "out" in kwargs:
            collect((kwargs["out"],), targets)
        for target in targets:
            if not is_batched(target):
                self._keep(target, name_of(func))

    def is_only_here(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this step and nothing else refers to its memory."""
        return (
            self._is_made(tensor)
            and not tensor.requires_grad
            and storage_uses(tensor) == 2  # the tensor, and this check
        )

    def require_kept(self, tensor: Tensor, func: Any) -> None:
        """After a function has changed a tensor, refuse the change if the value before is not known.

        Raises:
            ModelError: if the tensor is not of this step and the function's name does not say that it writes.
        """
        if self._is_made(tensor) or storage_address(tensor) in self.written or id(tensor) in self.written:
            return
        raise ModelError(
            f"training_step changes a tensor of shape {tuple(tensor.shape)} in place by {name_of(func)}. Write to it "
            "with a function whose name says so, such as tensor.copy_(...)."
        )

    def living(self) -> list[Tensor]:
        """Tensors that the step has made and that are still referenced."""
        return [tensor for ref in self._refs.values() if (tensor := ref()) is not None]

    def _is_made(self, tensor: Tensor) -> bool:
        known = self._refs.get(id(tensor))
        return known is not None and known() is tensor  # another tensor may have had this id

    def _keep(self, target: Tensor, name: str) -> None:
        storage = storage_address(target)
        for parameter_name, parameter in self._parameters.values():
            if parameter is target or storage_address(parameter) == storage:
                raise ModelError(
                    f"training_step changes the parameter '{parameter_name}' in place ({name}). Only the optimizer "
                    "changes parameters."
                )
        if name == "__set__":  # the tensor gets another storage
            self.written.setdefault(id(target), (target, target.detach().clone()))
        elif storage not in self.written and any(
            storage_address(tensor) == storage for tensor in self._outside.values()
        ):
            whole = torch.empty(0, dtype=target.dtype, device=target.device).set_(target.untyped_storage())
            self.written[storage] = (whole, whole.clone())
