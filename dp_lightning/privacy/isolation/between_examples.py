"""Checks that the program keeps nothing of one example while another one is computed.

Under ``together``, the numbers of an example are only in tensors that the step makes; one that is still alive after the
step has escaped. Other state, such as the vectors of a spectral norm, the weights of a teacher, or a counter, does
not come from an example: in each physical batch it starts from the value at the beginning of the logical step, and it
advances once per logical step, so it does not depend on the number of physical batches. Everything else that is
reachable from the module must be the same after a physical batch as before.

Under ``one_by_one``, any state may come from the example: it must be the same after each example as before, and plain
values that were replaced are put back. Buffers that are written in place are put back too, and advance once per logical
step to the value that the loss of a synthetic example gives them. That value comes from weights alone, whatever the
code does. If an example would give a buffer another value, the step is refused.
"""

import copy
import gc
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dp_lightning.errors import DataError, ModelError
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import BATCH_NORM, HOST_DRAW, is_of_batch_norm
from dp_lightning.privacy.gradients.sources import leaves_of
from dp_lightning.privacy.isolation.later import Later
from dp_lightning.privacy.isolation.reachable import Ignored, NamesOf, is_atom, no_names, nothing_ignored
from dp_lightning.privacy.isolation.sealed_data import SealedData
from dp_lightning.privacy.isolation.state import Change, StateSnapshot
from dp_lightning.privacy.isolation.watch import UnknownTensors, Watch, all_tensors, memory_of, storage_of

_FIX = (
    "What is computed from an example may leave the step only as its gradient. Empty lists and caches before "
    "training_step returns, make constants in __init__ (register_buffer), keep state that depends on the step number "
    "in a callback (trainer.global_step), and report numbers of the batch with self.log."
)
_HOOK = (
    "Register hooks of modules before the fit. If a library registers them in the first call of its model, call the "
    "model once before the fit, such as in configure_model. Otherwise register the hook in __init__."
)
# The entry for modules that were put into training or evaluation mode.
_MODES = "*.training"
_OF_HOOKS = re.compile(r"\._(forward|backward)(_pre)?_hooks\w*\[")


class Isolation:
    """What a module may keep between examples.

    Args:
        module: the module that is trained.
        parameters: the trained parameters by name.
        sealed: the training set; tensors in it are not constants.
        later: where what a GPU finds out is given to be read. What the methods below raise for its tensors, it raises.
        generators: random generators that get a new key before each loss.
        ignored: called with an object and the name of one of its attributes; true if it is checked elsewhere.
        by_identity: names of an object's ignored attributes that a loss must leave as they are.
        also: further objects, by name, that the loss may change.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        *,
        sealed: SealedData,
        later: Later,
        generators: Iterable[object] = (),
        ignored: Ignored = nothing_ignored,
        by_identity: NamesOf = no_names,
        also: Mapping[str, object] = types.MappingProxyType({}),
    ) -> None:
        self._module, self._parameters = module, {id(p): name for name, p in parameters.items()}

        def left_out(owner: object, name: str) -> bool:
            # The gradients of the trained parameters belong to the optimizer.
            return owner in sealed or (name == "grad" and id(owner) in self._parameters) or ignored(owner, name)

        sealed.require_not_in({"self": module, **also}, left_out)
        self._sealed, self._later = sealed, later
        self._snapshot = StateSnapshot(module, left_out, name="self", also=also, by_identity=by_identity)
        data = {memory_of(tensor) for tensor in sealed.tensors}
        self._constants: dict[int, weakref.ref[Tensor]] = {}
        for value in all_tensors():
            if memory_of(value) not in data:
                self.know(value)
        for tensor in (*module.parameters(), *module.buffers()):  # even if the loader refers to the module
            self.know(tensor)
        self._advanced: dict[object, Callable[[], None]] = {}
        self._next: dict[int, Tensor] = {}  # the value that the public example gives a buffer, by its storage
        self._unknown = UnknownTensors(self.is_known)
        self._generators = {id(generator): generator for generator in generators}
        self._failure = ""  # of the public example's loss
        self._undone: set[str] = set()
        self._within_step = self._after_optimizer = self._evaluated = False
        #: Attributes that code other than ``training_step`` has changed since the start. The modes of all modules are
        #: one entry, and so is each optimizer and schedule.
        self.changed_outside: set[str] = set()
        self._noted: set[str] = set()

    def know(self, tensor: Tensor) -> None:
        """Allow the step to use a tensor."""
        key = id(tensor)
        self._constants[key] = weakref.ref(tensor, lambda gone: self._constants.pop(key, None) and None)

    def copied(self, entry: Any) -> Any:
        """A copy of an entry of an example; data sets that it refers to are not copied.

        Raises:
            DataError: if it cannot be copied.
        """
        if is_atom(entry):
            return entry
        try:
            return copy.deepcopy(entry, {id(value): value for value in self._sealed.objects})
        except Exception as error:  # a user's object may raise anything
            raise DataError(
                f"In the training set's batches, an entry of class {type(entry).__name__} cannot be copied ({error}). "
                "Let the data set return tensors, numbers and strings."
            ) from error

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer, or a constant from before the fit."""
        return id(tensor) in self._constants

    def stale(self) -> dict[int, weakref.ref[Tensor]]:
        return {}

    def watch(self) -> Watch:
        """A watch over the losses of a physical batch, one example at a time."""
        trained = {storage_of(tensor) for tensor in self._module.parameters() if id(tensor) in self._parameters}
        tensors = (*self._module.parameters(), *self._module.buffers())
        return Watch(self.is_known, self._unknown.tensors(), {storage_of(tensor) for tensor in tensors} - trained)

    def advance(self) -> bool:
        """End the logical step: state that is computed from weights alone takes its next value.

        Returns:
            Whether there is such state.
        """
        self._within_step = False
        self._next.clear()
        for advance in self._advanced.values():
            advance()
        if not self._advanced:
            return False
        self._advanced.clear()
        self._snapshot.refresh()
        return True

    def stepped(self) -> None:
        """Note that the optimizer has stepped: until the next loss, nothing else may change a tensor of the model."""
        self._note_outside(self._snapshot.changes(later=self._later))  # the optimizer changes tensors
        self._snapshot.refresh(as_compared=True)
        self._after_optimizer, self._evaluated = True, False

    def evaluated(self) -> None:
        """Note that validation data went through the model, which may change all tensors but the trained parameters."""
        self._evaluated = True

    def touched(self) -> list[str]:
        """Tensors of the model that other code has changed since the optimizer stepped."""
        self._later.look()
        return self._touched(self._snapshot.changes(), self._evaluated) if self._after_optimizer else []

    def require_untouched(self) -> None:
        """Require that only the optimizer changes the model between two losses.

        Raises:
            ModelError: naming what other code has changed.
        """
        _require_only_releases(self.touched())
        self._later.settle()

    def begin_elsewhere(self) -> None:
        """Prepare for a loss at parameters other than those that the optimizer left.

        Raises:
            ModelError: as in :meth:`require_untouched`.
        """
        if self._after_optimizer:
            self._changes(self._of_releases())
        self._after_optimizer = False

    @contextmanager
    def together(self, recording: Recording) -> Iterator[None]:
        """Context around a physical batch under vmap.

        Raises:
            ModelError: naming what the batch has left behind.
        """
        self._begin()
        with self._sealed.closed():
            yield
        with torch.no_grad():
            for key, (tensor, before) in recording.written.items():
                self._advanced[key] = _setter(tensor, tensor.detach().clone())
                tensor.copy_(before)
        self._require_unchanged(self._put_back)
        self._require_gone(recording)

    @contextmanager
    def one_by_one(self, watch: Watch, *, public: bool) -> Iterator[None]:
        """Context around a single example; plain values that it has replaced are put back.

        Args:
            watch: the watch over its loss.
            public: whether the example is not from the training set. An error in its loss is not raised.

        Raises:
            ModelError: naming what else it has left behind.
        """
        self._begin()
        if public:
            self._failure = ""
        try:
            with self._sealed.closed():
                yield
        except Exception as error:
            if not public:
                raise
            self._failure = f" The synthetic example's loss failed: {type(error).__name__}: {error}"
        with torch.no_grad():
            for key, (tensor, before) in watch.end_example().items():
                after = tensor.clone()
                if public:
                    self._next[key], self._advanced[key] = after, _setter(tensor, after)
                if public or (key in self._next and _same_bits(after, self._next[key])):
                    tensor.copy_(before)
        self._require_unchanged(self._undo)

    @contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """Context around losses that are not part of a step, such as a trial's: their changes are undone.

        Raises:
            ModelError: naming what cannot be undone.
        """
        self._snapshot.refresh()
        try:
            yield
        finally:
            _refuse([change for change in self._snapshot.restore() if change.kind != "generator"])

    def require_own_leaves(self, loss: Tensor) -> None:
        """Refuse a loss whose gradient would reach a tensor that is not a trained parameter.

        Raises:
            ModelError: with its shape.
        """
        for leaf in leaves_of(loss):  # a leaf that the step has made is allowed
            if id(leaf) not in self._parameters and self.is_known(leaf):
                raise ModelError(
                    f"training_step uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is not a "
                    "trained parameter of the module. Make it an nn.Parameter of the module, or detach it."
                )

    def _begin(self) -> None:
        if self._within_step:
            changes = self._changes(self._require_one_model)
        elif self._after_optimizer:
            changes = self._changes(self._of_releases())
        else:
            changes = self._snapshot.changes(later=self._later)
        self._within_step, self._after_optimizer = True, False
        self._note_outside(changes)
        self._snapshot.refresh(as_compared=True)
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if id(tensor) not in self._constants:
                self.know(tensor)

    def _changes(self, require: Callable[[list[Change]], None]) -> list[Change]:
        """What differs from the snapshot, which ``require`` may refuse: now, or for tensors of a GPU later."""
        changes = self._snapshot.changes(later=self._later, then=require)
        require(changes)
        return changes

    def _of_releases(self) -> Callable[[list[Change]], None]:
        evaluated = self._evaluated
        return lambda changes: _require_only_releases(self._touched(changes, evaluated))

    def _note_outside(self, changes: list[Change]) -> None:
        """Note attributes; what every training changes by the dozen is named as a whole."""
        new = [change for change in changes if change.kind == "attribute" and change.path not in self._noted]
        if not new:
            return
        self._noted.update(change.path for change in new)
        wholes = self._snapshot.paths_of(Optimizer, LRScheduler)
        for change in new:
            around = (whole for whole in wholes if change.path.startswith((f"{whole}.", f"{whole}[")))
            self.changed_outside.add(_MODES if _is_mode(change) else next(around, change.path))

    def _touched(self, changes: list[Change], evaluated: bool) -> list[str]:
        if evaluated:
            return [change.path for change in changes if id(change.source) in self._parameters]
        return self._tensors_in(changes)

    def _tensors_in(self, changes: list[Change]) -> list[str]:
        held = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        return [change.path for change in changes if change.kind == "tensor" or id(change.new) in held]

    def _require_one_model(self, changes: list[Change]) -> None:
        if names := [*self._tensors_in(changes), *(change.path for change in changes if change.kind == "attribute")]:
            raise ModelError(
                f"{', '.join(dict.fromkeys(names[:5]))} changed between two physical batches of one step, by code "
                "other than training_step, such as a callback. The number of physical batches depends on the draw. "
                "Change what the loss can see once per step, in optimizer_step after the optimizer, or keep it in the "
                "callback."
            )

    def _require_unchanged(self, allowed: Callable[[Change], bool]) -> None:
        failure = self._failure

        def require(found: list[Change]) -> None:
            changes = [change for change in found if not allowed(change)]
            if drawn := [change.path for change in changes if change.kind == "generator"]:
                raise ModelError(f"training_step draws from {', '.join(drawn[:5])}. {HOST_DRAW}")
            _refuse(changes, failure)

        self._changes(require)

    def _put_back(self, change: Change) -> bool:
        """Undo the change if one plain value replaced another. Under vmap, none can come from an example."""
        if not change.is_plain:
            return False
        self._advanced[id(change.holder), change.key] = change.redo
        if isinstance(change.new, Tensor):
            self.know(change.new)
        change.undo()
        return True

    def _undo(self, change: Change) -> bool:
        if id(change.source) in self._generators:  # it gets a new key before the next example
            return True
        if not change.is_plain:
            return False
        if change.path not in self._undone:
            self._undone.add(change.path)
            warnings.warn(
                f"training_step changes {change.path}. Under privacy.examples: one_by_one this is undone after each "
                "example, so it has no effect.",
                stacklevel=2,
            )
        change.undo()
        return True

    def _require_gone(self, recording: Recording) -> None:
        for generation in (None, 1, 2):
            if generation is not None:
                gc.collect(generation)
            if not recording.living():
                return
        raise ModelError(f"training_step keeps a tensor of an example{_owner(recording.living())}. {_FIX}")


def _is_mode(change: Change) -> bool:
    """Whether a module was put into training or evaluation mode."""
    return change.path.endswith(".training") and type(change.old) is type(change.new) is bool


def _require_only_releases(names: list[str]) -> None:
    if names:
        raise ModelError(
            f"{', '.join(names[:5])} changed between two steps, by code other than the optimizer, such as a hook. Only "
            "what the steps release may change the model. Change its tensors, such as the weights of a teacher, in "
            "training_step, or in optimizer_step after the optimizer."
        )


def _refuse(changes: list[Change], failure: str = "") -> None:
    if changes:
        names = ", ".join(dict.fromkeys(change.path for change in changes[:5]))
        fix = BATCH_NORM if is_of_batch_norm(names) else _HOOK if _OF_HOOKS.search(names) else _FIX
        raise ModelError(f"training_step changes {names}. {fix}{failure}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors (n,) of one dtype have the same bits, so that a nan equals itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


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
                if type(holder) is Change:  # the place that held it before the change was undone
                    return f" in {holder.path}"
                if isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder:
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
