"""What escapes from an example may not come back: five ways around vmap, and what is done about each.

Under ``together`` vmap is the wall: code that is mapped cannot reach another example. A few things lead around it, and
honest code does all of them:

1. A tensor of an example that is kept, and used in a later physical batch. torch would take it for one of that batch.
   `Recording` refuses every tensor in ``Isolation.stale``.
2. A list that collects tensors of examples for the end of the epoch. A tensor that is alive when the next logical step
   has ended is refused, with its place; a second one of the same shape is refused once Python has collected garbage.
   An attribute that each step overwrites passes.
3. State that follows from the weights alone: the vectors of a spectral norm, a teacher, a counter of steps. In each
   physical batch it starts from its value at the start of the logical step, and it advances once for each logical step,
   so that nothing depends on the number of physical batches.
4. Random numbers of NumPy or Python: one draw would serve all examples of a physical batch. This is a warning.
5. Tensors of the training set that the module holds.

Under ``one_by_one`` the state of 3 is put back after each example, and advances to what a synthetic example makes of
it. Beyond that, the code is trusted to keep nothing from one example to the next.
"""

import gc
import random
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import BATCH_NORM, HOST_DRAW, is_of_batch_norm
from dp_lightning.torch_internals import is_batched

_NUMBERS = (bool, int, float)
_ABSENT: Any = object()
# Levels of lists and dictionaries in which a kept tensor is looked for, to name its place.
_DEPTH = 4


class Isolation:
    """The checks of one run.

    Args:
        module: the module that is trained; its attributes hold the state.
        parameters: the trained parameters by name, which only the optimizer changes.

    Attributes:
        stale: tensors of examples of earlier physical batches that are still alive, by their ids.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._module, self._trained = module, {id(parameter) for parameter in parameters.values()}
        self.stale: dict[int, weakref.ref[Tensor]] = {}
        self._parts: list[tuple[nn.Module, list[str]]] = []  # modules, with the names of their buffers
        self._tensors: list[tuple[Tensor, Tensor]] = []  # state under one_by_one, with its value
        self._next: dict[object, tuple[Any, ...]] = {}  # state, with its value after the logical step
        self._made: list[weakref.ref[Tensor]] = []  # tensors of examples of this step
        # Tensors of examples of earlier steps, each with the number of full collections of garbage until then.
        self._waiting: list[tuple[int, weakref.ref[Tensor]]] = []
        self._collected: set[object] = set()
        self._warned = False

    def begin(self, *, together: bool) -> None:
        """Begin a logical step: find the places of its state."""
        self._next.clear()
        self._made.clear()
        self._parts = [
            (part, [name for name, _ in part.named_buffers(recurse=False)]) for part in self._module.modules()
        ]
        if not together:
            tensors = (*self._module.buffers(), *self._module.parameters())
            self._tensors = [(each, each.detach().clone()) for each in tensors if id(each) not in self._trained]

    @contextmanager
    def together(self, recording: Recording) -> Iterator[None]:
        """Context around a physical batch under vmap."""
        state, generators = self._state(), host_generators()
        try:
            yield
        finally:
            with torch.no_grad():
                for key, (tensor, value) in recording.written.items():
                    self._next[key] = (tensor, tensor.detach().clone())
                    tensor.copy_(value)
            kept = self._put_back(state, advances=True)
            for tensor in recording.living():
                self._made.append(weakref.ref(tensor))
                self.stale[id(tensor)] = self._made[-1]
        if kept is not None:  # a buffer, which checkpoints save
            cure = BATCH_NORM if is_of_batch_norm(kept) else "Buffers are saved with the weights: do not assign to it."
            raise ModelError(f"training_step keeps a tensor of an example in the buffer {kept}. {cure}")
        if not self._warned and host_generators() != generators:
            self._warned = True
            warnings.warn(f"training_step draws from numpy.random or random. {HOST_DRAW}", stacklevel=2)

    @contextmanager
    def one_by_one(self, *, advances: bool) -> Iterator[None]:
        """Context around one example.

        Args:
            advances: whether the example is synthetic, so that the state follows from the weights alone.
        """
        state = self._state()
        try:
            yield
        finally:
            with torch.no_grad():
                for number, (tensor, value) in enumerate(self._tensors):
                    if advances:
                        self._next[number] = (tensor, tensor.detach().clone())
                    tensor.copy_(value)
            self._put_back(state, advances=advances)

    def end(self) -> None:
        """End the logical step: its state advances.

        Raises:
            ModelError: naming what still holds a tensor of an example of the step before.
        """
        self._require_gone()
        with torch.no_grad():
            for place, *values in self._next.values():
                if isinstance(place, nn.Module):
                    setattr(place, *values)
                else:
                    place.copy_(*values)
        self._next.clear()

    def _state(self) -> list[dict[str, Any]]:
        """The attributes and buffers of each module."""
        return [vars(part) | {name: getattr(part, name, None) for name in buffers} for part, buffers in self._parts]

    def _put_back(self, state: list[dict[str, Any]], *, advances: bool) -> str | None:
        """Give numbers and tensors in attributes that were replaced the values that they had.

        Returns:
            A buffer that was replaced by a tensor of an example, if there is one.
        """
        kept = None
        for (part, buffers), before, now in zip(self._parts, state, self._state(), strict=True):
            for name, value in now.items():
                held = before.get(name, _ABSENT)
                if held is value:
                    continue
                is_tensor, was_state = isinstance(value, Tensor), isinstance(held, (*_NUMBERS, Tensor))
                if not (type(value) in _NUMBERS or (is_tensor and was_state)):
                    continue
                if is_tensor and is_batched(value):
                    if name not in buffers:
                        continue  # such as a draw or a sample of an example, which the next one overwrites
                    kept = f"{type(part).__name__}.{name}"
                elif advances:
                    self._next[id(part), name] = (part, name, value)
                if held is _ABSENT:
                    delattr(part, name)
                else:
                    setattr(part, name, held)
        return kept

    def _require_gone(self) -> None:
        new = {(tuple(tensor.shape), tensor.dtype) for tensor in _living(self._waiting)} - self._collected
        if new:  # they may be parts of cycles; a collection takes a tenth of a second, so one for each shape and type
            self._collected |= new
            gc.collect()
        collections = int(gc.get_stats()[-1]["collections"])  # full collections so far
        if held := _living((before, ref) for before, ref in self._waiting if before < collections):
            raise ModelError(
                f"A tensor of one example, of shape {tuple(held[0].shape)}, is still kept{_place_of(held[0])} when the "
                "next step has ended. What is computed from an example may leave the step only as its gradient. Log "
                "numbers by self.log, which also gives their mean over the epoch (on_epoch=True); clear lists in "
                "on_train_batch_end."
            )
        self._waiting = [(before, ref) for before, ref in self._waiting if ref() is not None]
        self._waiting += [(collections, ref) for ref in self._made if ref() is not None]
        self._made.clear()
        self.stale = {key: ref for key, ref in self.stale.items() if ref() is not None}


def require_own_tensors(module: nn.Module, dataset: Any) -> None:
    """Refuse a module that holds tensors of the training set: its loss would see other examples.

    Raises:
        ConfigurationError: naming the attribute.
    """
    spans = [span for part in with_inner(dataset) for value in vars(part).values() for span in _spans(value)]
    first, last = np.array(spans, dtype=np.uint64).reshape(-1, 2).T
    for prefix, part in module.named_modules():
        own = vars(part) | dict(part.named_buffers(recurse=False)) | dict(part.named_parameters(recurse=False))
        for name, value in own.items():
            if any(bool(((first < end) & (start < last)).any()) for start, end in _spans(value)):
                raise ConfigurationError(
                    f"{prefix + '.' if prefix else ''}{name} of the module shares memory with the training set, so a "
                    "loss could use other examples than its own. Remove it; keep a copy of public data in a buffer."
                )


def host_generators() -> tuple[Any, ...]:
    """The states of NumPy's and Python's global generators."""
    name, words, *rest = np.random.get_state()
    return name, np.asarray(words).tobytes(), *rest, random.getstate()


def _living(waiting: Iterable[tuple[int, weakref.ref[Tensor]]]) -> list[Tensor]:
    return [tensor for tensor in (ref() for _, ref in waiting) if tensor is not None]


def _place_of(tensor: Tensor) -> str:
    """The attribute that leads to a tensor, in words; empty where none is found."""
    found: list[tuple[Any, Any]] = [(tensor, None)]
    for _ in range(_DEPTH):
        containers = []
        for value, child in found:
            for holder in gc.get_referrers(value):
                own = getattr(holder, "__dict__", None)
                part = child if own is value else value
                for name, held in own.items() if isinstance(own, dict) else ():
                    if held is part:
                        return f" in {getattr(holder, '__name__', type(holder).__name__)}.{name}"
                if isinstance(holder, list | dict | set):
                    containers.append((holder, value))
        found = containers
    return ""


def with_inner(dataset: Any) -> list[Any]:
    """A data set and the data sets in its attributes, such as that of a Subset, each once."""
    found, waiting = dict[int, Any](), [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and hasattr(each, "__dict__"):
            found[id(each)] = each
            for value in vars(each).values():
                inner = value if isinstance(value, list | tuple) else (value,)
                waiting += [one for one in inner if isinstance(one, Dataset)]
    return list(found.values())


def _spans(value: Any) -> list[tuple[int, int]]:
    """First and last byte of the memory of a tensor or an array, or of each of a list or tuple of them."""
    if isinstance(value, list | tuple):
        return [span for each in value if isinstance(each, Tensor | np.ndarray) for span in _spans(each)]
    if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta":
        storage = value.untyped_storage()
        return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes())] if storage.nbytes() else []
    if isinstance(value, np.ndarray) and value.nbytes:
        first, last = np.lib.array_utils.byte_bounds(value)
        return [(first, last)]
    return []
