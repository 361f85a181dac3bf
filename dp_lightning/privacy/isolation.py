"""Closes the ways by which something of one example could wait in the program for another one.

Under ``together`` a number of an example lives in a tensor that only the step can make, and one that is alive after the
step has escaped. Other state, such as the vectors of a spectral norm, the weights of a teacher, or a counter, is no
example's: it starts each physical batch from the value of the logical step, and advances once with it, so that it does
not depend on how many physical batches there were. Everything else that is reachable from the module has to be after a
physical batch what it was before.

Under ``one_by_one`` any of it may come from the example: all has to be what it was before each, and plain values that
took the place of others are put back.
"""

import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.functions import collect, initialized
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import BATCH_NORM, RESIZED, is_of_batch_norm
from dp_lightning.privacy.gradients.sources import leaves_of
from dp_lightning.privacy.reachable import ATOMS, Ignored, nothing_ignored
from dp_lightning.privacy.sealed import SealedData
from dp_lightning.privacy.state import ABSENT, Change, StateSnapshot

_FIX = (
    "What is computed from an example may leave the step only as its gradient. Keep state that follows the steps in a "
    "callback, by trainer.global_step; take numbers of the batch out of training_step by self.log."
)


class Isolation:
    """What a module may keep between examples.

    Args:
        module: whose loss is trained.
        parameters: the trained ones by name.
        sealed: the training set; tensors in it are no constants.
        ignored: asked with an object and the name of one of its attributes, whether it is looked after elsewhere.
        also: further objects, by name, that the loss may change.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        *,
        sealed: SealedData,
        ignored: Ignored = nothing_ignored,
        also: Mapping[str, object] = types.MappingProxyType({}),
    ) -> None:
        self._module, self._parameters = module, {id(p): name for name, p in parameters.items()}

        def left_out(owner: object, name: str) -> bool:
            # The gradients of the trained parameters are the optimizer's.
            return owner in sealed or (name == "grad" and id(owner) in self._parameters) or ignored(owner, name)

        sealed.require_not_in({"self": module, **also}, left_out)
        self._sealed = sealed
        self._snapshot = StateSnapshot(module, left_out, name="self", also=also)
        data = {_memory_of(tensor) for tensor in sealed.tensors}
        self._constants: dict[int, weakref.ref[Tensor]] = {}
        for value in gc.get_objects():
            if issubclass(type(value), Tensor) and _memory_of(value) not in data:
                self.know(value)
        for tensor in (*module.parameters(), *module.buffers()):  # though the loader may lead to the module
            self.know(tensor)
        self._advanced: dict[object, Callable[[], None]] = {}
        self._undone: set[str] = set()
        self._within_step = False
        #: Attributes that other code than ``training_step`` has changed since the start.
        self.changed_outside: set[str] = set()

    def know(self, tensor: Tensor) -> None:
        """A tensor that the step may use."""
        key = id(tensor)
        self._constants[key] = weakref.ref(tensor, lambda gone: self._constants.pop(key, None) and None)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer, or a constant of before the fit."""
        return id(tensor) in self._constants

    def older_tensors(self) -> "OlderTensors":
        """The tensors that the examples of a physical batch may not use, since they may hold other examples."""
        found = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and not self.is_known(value)]
        return OlderTensors(found)

    def advance(self) -> None:
        """The logical step is over: state that is computed from weights alone takes its next value."""
        self._within_step = False
        for advance in self._advanced.values():
            advance()
        if self._advanced:
            self._advanced.clear()
            self._snapshot.refresh()

    @contextmanager
    def together(self, recording: Recording) -> Iterator[None]:
        """Around a physical batch under vmap.

        Raises:
            ModelError: naming what it has left behind.
        """
        self._begin()
        with self._sealed.closed():
            yield
        for made in recording.living(of_examples=False):  # constants of later batches
            self.know(made)
        with torch.no_grad():
            for key, (tensor, before) in recording.written.items():
                self._advanced[key] = _setter(tensor, tensor.detach().clone())
                tensor.copy_(before)
        self._require_unchanged(self._put_back)
        self._require_gone(recording)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Around a single example; values that it has put in the place of others are put back.

        Raises:
            ModelError: naming what it has left behind otherwise.
        """
        self._begin()
        with self._sealed.closed():
            yield
        self._require_unchanged(self._undo)

    def require_own_leaves(self, loss: Tensor) -> None:
        """Refuse a loss whose gradient would reach a tensor that is no trained parameter.

        Raises:
            ModelError: with its shape.
        """
        for leaf in leaves_of(loss):  # one that the step has made is its own
            if id(leaf) not in self._parameters and self.is_known(leaf):
                raise ModelError(
                    f"training_step uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is not a "
                    "trained parameter of the module. Make it an nn.Parameter of the module, or detach it."
                )

    def _begin(self) -> None:
        changes = self._snapshot.changes()
        if self._within_step:
            self._require_one_model(changes)
        self._within_step = True
        self.changed_outside.update(change.path for change in changes if change.kind == "attribute")
        self._snapshot.refresh()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if id(tensor) not in self._constants:
                self.know(tensor)

    def _require_one_model(self, changes: list[Change]) -> None:
        held = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        if names := [change.path for change in changes if change.kind == "tensor" or id(change.new) in held]:
            raise ModelError(
                f"{', '.join(names[:5])} changed between two physical batches of one step, by other code than "
                "training_step, such as a hook. How many there are depends on the draw. Change tensors of the model "
                "once per step, after the optimizer: in a hook, where trainer.accumulate_grad_batches is 1."
            )

    def _require_unchanged(self, allowed: Callable[[Change], bool]) -> None:
        changes = [change for change in self._snapshot.changes() if not allowed(change)]
        if changes:
            names = ", ".join(dict.fromkeys(change.path for change in changes[:5]))
            raise ModelError(f"training_step changes {names}. {BATCH_NORM if is_of_batch_norm(names) else _FIX}")

    def _put_back(self, change: Change) -> bool:
        """Whether a plain value took the place of another one. Under vmap none can come from an example."""
        if not is_plain(change):
            return False
        holder, key, new = change.holder, change.key, change.new
        self._advanced[id(holder), key] = lambda: put(holder, key, new)
        if isinstance(new, Tensor):
            self.know(new)
        put(holder, key, change.old)
        return True

    def _undo(self, change: Change) -> bool:
        if not is_plain(change):
            return False
        if change.path not in self._undone:
            self._undone.add(change.path)
            warnings.warn(
                f"training_step changes {change.path}. Under privacy.examples: one_by_one that is undone after each "
                "example, so that it never counts.",
                stacklevel=2,
            )
        put(change.holder, change.key, change.old)
        return True

    def _require_gone(self, recording: Recording) -> None:
        for generation in (None, 1, 2):
            if generation is not None:
                gc.collect(generation)
            if not recording.living(of_examples=True):
                return
        raise ModelError(
            f"training_step keeps a tensor of an example{_owner(recording.living(of_examples=True))}. {_FIX}"
        )


class OlderTensors(TorchFunctionMode):
    """Refuses tensors of before that are no constants, where code that runs by itself uses them.

    Args:
        tensors: those that are refused.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in RESIZED:
            raise ModelError(f"training_step uses {RESIZED[func]}")
        used: list[Tensor] = []
        collect((args, kwargs or {}), used)
        for tensor in used:
            older = self._tensors.get(id(tensor))
            if older is not None and older() is tensor:
                raise ModelError(
                    f"training_step uses a tensor of shape {tuple(tensor.shape)} that is no parameter, no buffer, and "
                    "not made in this step, so that it may hold other examples. Make it a buffer of the module."
                )
        return initialized(func, func(*args, **(kwargs or {})))


def _memory_of(tensor: Tensor) -> int:
    """What tells the memory of a tensor from that of others; views have that of their base."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:  # sparse, or a wrapper, each of which raises its own
        return id(tensor)


def is_plain(change: Change) -> bool:
    """Whether one value took the place of another one, and both hold nothing but themselves."""
    values = (change.old, change.new)
    return isinstance(change.holder, dict) and all(
        value is ABSENT or type(value) in ATOMS or isinstance(value, Tensor) for value in values
    )


def put(holder: Any, key: Any, value: Any) -> None:
    """Let a value stand in a holder, or nothing where it is ABSENT."""
    if value is ABSENT:
        holder.pop(key, None)
    else:
        holder[key] = value


def _setter(tensor: Tensor, value: Tensor) -> Callable[[], None]:
    def advance() -> None:
        with torch.no_grad():
            tensor.copy_(value)

    return advance


def _owner(tensors: list[Tensor]) -> str:
    """Where one of the tensors is held, in words."""
    holders: list[Any] = [tensors]
    found: list[Any] = list(tensors)
    for _ in range(4):
        for value in found:
            for holder in gc.get_referrers(value):
                if any(holder is known for known in holders) or type(holder).__name__ == "frame":
                    continue
                if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
                    names = [name for name, held in holder.items() if held is value]
                    return f" in {holder['__name__']}.{names[0] if names else '?'}"
                if hasattr(holder, "__dict__") and not isinstance(holder, type):
                    names = [name for name, held in vars(holder).items() if held is value]
                    if names:
                        return f" in {type(holder).__name__}.{names[0]}"
        found = [
            holder for value in found for holder in gc.get_referrers(value) if isinstance(holder, (list, dict, set))
        ]
    return ""
