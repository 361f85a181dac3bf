"""What a model can remember: the state reachable from it, compared before and after a step.

A step that keeps something of one example (a list that it appends to, a counter in a closure, a buffer written through
NumPy) can carry it into the gradient of another. :class:`StateSnapshot` names such state by its path: what stands in
the places that :mod:`~dp_lightning.privacy.reachable` finds, and what arrays and generators hold. A tensor's ``.grad``
is no state. Out of its reach are files, other processes, and objects written in C that no rule there describes.
"""

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dp_lightning.privacy.contents import GENERATORS, Array, Contents, generator_state
from dp_lightning.privacy.reachable import ATOMS, Ignored, Place, reachable, walk

__all__ = ["ABSENT", "Change", "Ignored", "StateSnapshot", "generator_state", "reachable"]

#: Stands for the value of a key that is not there.
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


@dataclass(frozen=True, eq=False)
class Change:
    """Something that is no longer what it was when the snapshot was taken.

    Where there is a holder, ``holder[key] = old`` undoes the change, or ``del holder[key]`` where ``old`` is ABSENT.

    Attributes:
        path: such as ``model.layers[3].count``, or ``Net.bank`` for an attribute of a class.
        kind: ``tensor`` for the numbers of a tensor or array, ``generator`` for the state of a random generator.
        tensor: whose numbers changed.
        holder: the dict or list in which another value stands, such as an object's ``__dict__`` or a module's
            ``_buffers``. None for all else, such as slots, closures, and lists of another length.
        key, old, new: where in the holder, what stood there, and what stands there now; ABSENT where nothing does.
    """

    path: str
    kind: Literal["attribute", "tensor", "generator"]
    tensor: Tensor | None = None
    holder: dict[Any, Any] | list[Any] | None = None
    key: Any = None
    old: Any = None
    new: Any = None


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without the ``__torch_function__`` of tensor subclasses, and outside of autograd and inference mode."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        yield


class StateSnapshot:
    """The state reachable from a root, to be compared with what it is later.

    Args:
        root: usually an ``nn.Module``.
        ignored: asked with an object and the name of one of its attributes; where it says true, the attribute is
            neither compared nor followed. True for every name leaves out all of an object.
        name: what paths call the root.
        also: further roots, by what paths call them.
    """

    def __init__(
        self,
        root: object,
        ignored: Ignored = lambda owner, name: False,
        *,
        name: str = "model",
        also: Mapping[str, object] = types.MappingProxyType({}),
    ):
        self._roots, self._ignored = {name: root, **also}, ignored
        self._take()

    @_plain_tensors()
    def changes(self) -> list[Change]:
        """What differs from the snapshot: attributes and generators first, then tensors."""
        found = [change for place in self._suspects() for change in _changes(place)]
        for path, array in map(self._arrays.__getitem__, self._contents.changed()):
            found.append(Change(path, "tensor", array if isinstance(array, Tensor) else None))
        return found

    @_plain_tensors()
    def refresh(self) -> None:
        """Take the snapshot anew; the root is walked again only where an attribute has changed."""
        suspects = self._suspects()
        changes = [(place, change) for place in suspects for change in _changes(place)]
        if any(change.kind == "attribute" for _, change in changes):
            return self._take()
        for place, _ in changes:
            place.held = place.now()
        if suspects is self._places:  # an equal value stands somewhere
            self._held = list(self._members())
        self._contents.hold()

    @_plain_tensors()
    def _take(self) -> None:
        self._places: list[Place] = []
        self._arrays: list[tuple[str, Array]] = []
        for path, value, places in walk(self._roots, self._ignored):
            self._places += [place for place in places if not isinstance(place.source, tuple | frozenset)]
            if issubclass(type(value), Tensor | np.ndarray):
                self._arrays.append((path, value))  # type: ignore[arg-type]
        self._contents = Contents([array for _, array in self._arrays])
        # Nearly all places are dicts, lists and sets all of whose members count. These are compared in one go, in C.
        self._others: list[Place] = []
        self._containers: dict[Any, list[Any]] = {dict: [], list: [], set: []}
        for place in self._places:
            kind = next((kind for kind in self._containers if isinstance(place.source, kind)), None)
            if kind is not None and kind.__len__(place.source) == len(place.held or ()):
                self._containers[kind].append(place.source)
            else:
                self._others.append(place)
        self._filled = {kind: list(filter(kind.__len__, each)) for kind, each in self._containers.items()}
        self._lengths, self._held = self._count(), list(self._members())

    def _count(self) -> list[list[int]]:
        return [list(map(kind.__len__, each)) for kind, each in self._containers.items()]

    def _members(self) -> Iterator[Any]:
        each = [map(kind.__iter__, containers) for kind, containers in self._filled.items()]
        return chain.from_iterable(chain.from_iterable([*each, map(dict.values, self._filled[dict])]))

    def _suspects(self) -> list[Place]:
        """The places to be compared one by one."""
        same = self._count() == self._lengths and all(map(is_, self._members(), self._held))
        return self._others if same else self._places


def _changes(place: Place) -> Iterator[Change]:
    source, held, now = place.source, place.held, place.now()
    kind: Literal["attribute", "generator"] = "generator" if isinstance(source, GENERATORS) else "attribute"
    if held is None or now is None or (isinstance(source, list) and len(held) != len(now)):
        if held is not now:
            yield Change(place.path, kind)
        return
    for key in held | now:
        old, new = held.get(key, ABSENT), now.get(key, ABSENT)
        if not _same(old, new):
            undo = (source, key, old, new) if isinstance(source, dict | list) else ()
            yield Change(place.path + place.label(key), kind, None, *undo)


def _same(old: Any, new: Any) -> bool:
    """Whether two values are one object, or equal and immutable. No method of a user's class is called."""
    kind = type(old)
    if old is new or kind is not type(new):
        return old is new
    if kind in ATOMS or (issubclass(kind, np.generic) and kind is not np.void):
        return repr(old) == repr(new)  # unlike by ==, -0.0 differs from 0.0, and nan does not from nan
    return kind is tuple and len(old) == len(new) and all(map(_same, old, new))
