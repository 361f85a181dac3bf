"""What a model can remember: the state reachable from it, compared before and after a step.

A step that keeps something of one example (a list that it appends to, a counter in a closure, a buffer written through
NumPy) can carry it into the gradient of another. :class:`StateSnapshot` names such state by its path: the members of
the places that ``reachable`` finds, the contents of arrays and generators, and the settings of the process that
libraries keep in C. It does not see files, threads, other processes, objects of other packages that are written in C,
and what is found only by its name, such as a logger that is created during the step.
"""

import gc
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dp_lightning.privacy.isolation.contents import GENERATORS, Array, Contents
from dp_lightning.privacy.isolation.later import Later
from dp_lightning.privacy.isolation.reachable import (
    Ignored,
    NamesOf,
    Place,
    attributes_named,
    is_atom,
    no_names,
    walk,
)
from dp_lightning.torch_internals import gradient_of, without_torch_function_of_subclasses

#: The value of a key that is missing.
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
# Prefixes of the names that Python and torch.compile write into modules, classes and functions.
_NOTES: tuple[str, ...] = ("__slotnames__", "__annotations__", "__warningregistry__")
_NOTES += ("__builtins_dict__", "__compiled_fn_", "__dynamo_disable", "__import_", "__resume_at_", "___needs")


@dataclass(frozen=True, eq=False)
class Change:
    """Something that has changed since the snapshot was taken.

    If there is a holder, the change can be undone.

    Attributes:
        path: such as ``model.layers[3].count``, or ``Net.bank`` for an attribute of a class.
        kind: ``tensor`` for the numbers of a tensor or array, ``generator`` for the state of a random generator,
            ``global`` for what is compared but not followed: settings, and members of modules and library classes.
        source: what was read, such as a tensor or a generator.
        holder: the dict or list whose value was replaced, such as an object's ``__dict__`` or a module's
            ``_buffers``. None for everything else, such as slots, closures, and lists whose length changed.
        key, old, new: the key in the holder, its value then, and its value now; ABSENT if there is none.
    """

    path: str
    kind: Literal["attribute", "tensor", "generator", "global"]
    source: Any = None
    holder: dict[Any, Any] | list[Any] | None = None
    key: Any = None
    old: Any = None
    new: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether one value replaced another in a dict, and each is an atom, a tensor or absent."""
        return isinstance(self.holder, dict) and all(
            value is ABSENT or is_atom(value) or isinstance(value, Tensor) for value in (self.old, self.new)
        )

    def undo(self) -> None:
        """Put the old value back into the holder."""
        _put(self.holder, self.key, self.old)

    def redo(self) -> None:
        """Put the new value into the holder again."""
        _put(self.holder, self.key, self.new)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without the ``__torch_function__`` of tensor subclasses, and outside of autograd and inference mode."""
    with without_torch_function_of_subclasses(), torch.inference_mode(False), torch.no_grad():
        yield


class StateSnapshot:
    """The state reachable from a root, to be compared with its later state.

    Args:
        root: usually an ``nn.Module``.
        ignored: called with an object and the name of one of its attributes; if it returns true, the attribute is
            neither compared nor followed. True for every name leaves out the whole object.
        name: the name of the root in paths.
        also: further roots, by their names in paths.
        by_identity: names of an object's attributes that are compared though they are ignored; what they refer to is
            not followed, beyond what a list, dict or set holds.
    """

    def __init__(
        self,
        root: object,
        ignored: Ignored = lambda owner, name: False,
        *,
        name: str = "model",
        also: Mapping[str, object] = types.MappingProxyType({}),
        by_identity: NamesOf = no_names,
    ):
        self._roots, self._ignored, self._by_identity = {name: root, **also}, ignored, by_identity
        self._settings: dict[str, Any] = {}
        self._seen: tuple[dict[str, Any], list[list[Place]]] = self._settings, []  # by the last comparison
        with _plain_tensors():
            self._take()

    def changes(
        self, *, later: Later | None = None, then: Callable[[list[Change]], None] | None = None
    ) -> list[Change]:
        """What differs from the snapshot: attributes, settings and generators first, then tensors.

        Args:
            later: where tensors of a GPU are given to be read, which are not returned then. None reads them now.
            then: called later with what differs there, if something does; None if it does not matter.
        """
        now, suspects = self._seen = self._look()
        found = [Change(name, "global") for name, value in self._settings.items() if now[name] != value]
        with _plain_tensors():
            found += [change for places in suspects for place in places for change in _changes(place)]
            unread = None if later is None else lambda flags, indices: self._read_later(flags, indices, later, then)
            return found + self._tensors(self._contents.changed(unread))

    def _read_later(
        self, flags: Tensor, indices: list[int], later: Later, then: Callable[[list[Change]], None] | None
    ) -> None:
        if then is None:
            return
        arrays = [self._arrays[index] for index in indices]

        def tell(read: Tensor) -> None:
            if read.any():
                then(
                    [
                        Change(path, "tensor", array)
                        for (path, array), differs in zip(arrays, read, strict=True)
                        if differs
                    ]
                )

        later.read(flags, tell)

    def _tensors(self, indices: list[int]) -> list[Change]:
        return [Change(path, "tensor", array) for path, array in map(self._arrays.__getitem__, indices)]

    def restore(self) -> list[Change]:
        """Put back the contents of attributes, containers and closures; returns the changes that remain."""
        with _plain_tensors():
            for place in [place for group in self._groups for place in group.suspects()]:
                if any(_changes(place)):
                    place.restore()
        return self.changes()

    def refresh(self, *, as_compared: bool = False) -> None:
        """Take a new snapshot; the roots are walked again only if an attribute has changed.

        Args:
            as_compared: no foreign code has run since the last ``changes``, whose look is used.
        """
        self._settings, suspects = self._seen if as_compared else self._look()
        with _plain_tensors():
            changed = {place: [*_changes(place)] for places in suspects for place in places}
            if any(change.kind == "attribute" for changes in changed.values() for change in changes):
                return self._take()
            for group, places in zip(self._groups, suspects, strict=True):
                group.note(places, changed)
            self._contents.hold(as_compared=as_compared)

    def paths_of(self, *kinds: type) -> list[str]:
        """The paths of the objects of these classes, as they are now."""
        return [path for path, value, _ in walk(self._roots, self._ignored) if issubclass(type(value), kinds)]

    def _look(self) -> tuple[dict[str, Any], list[list[Place]]]:
        """The settings now, and the places of each group to be compared one by one."""
        now: dict[str, Any] = {}
        with _plain_tensors():
            return now, [group.suspects() for group in self._groups]

    def _take(self) -> None:
        followed: list[Place] = []
        others: list[Place] = []
        self._arrays: list[tuple[str, Array]] = []
        for path, value, places in walk(self._roots, self._ignored):
            if names := self._by_identity(value):
                places.extend(attributes_named(names, path, value))
            for place in places:
                if not isinstance(place.source, tuple | frozenset):
                    (followed if place.followed else others).append(place)
            if issubclass(type(value), Tensor | np.ndarray):
                self._arrays.append((path, value))  # type: ignore[arg-type]
        self._contents = Contents([array for _, array in self._arrays])
        self._groups = _Group(followed), _Group(others)


class _Group:
    """Places that are compared together.

    Nearly all are dicts, lists and sets of which every member counts. These are compared in one go, in C.
    """

    def __init__(self, places: list[Place]):
        self._places, self._others = places, []
        self._containers: dict[Any, list[Any]] = {dict: [], list: [], set: []}
        self._tensors: list[Tensor] = []
        for place in places:
            source = place.source
            if isinstance(source, type):
                (source,) = gc.get_referents(vars(source))
            kind = next((kind for kind in self._containers if isinstance(source, kind)), None)
            if kind is not None and kind.__len__(source) == len(place.held or ()):
                self._containers[kind].append(source)
            elif isinstance(source, Tensor) and place.held is not None:
                self._tensors.append(source)
            else:
                self._others.append(place)
        self._take()

    def suspects(self) -> list[Place]:
        """The places to be compared one by one."""
        same = self._count() == self._lengths and all(map(is_, self._members(), self._held))
        return self._others if same else self._places

    def note(self, suspects: list[Place], changed: dict[Place, list[Change]]) -> None:
        """From here on, compare with what the places hold now, such as an equal value or a note."""
        everywhere = suspects is self._places
        for place in suspects:
            if everywhere or changed[place]:
                place.held = place.now()
        if everywhere:
            self._take()

    def _take(self) -> None:
        self._filled = {kind: list(filter(kind.__len__, each)) for kind, each in self._containers.items()}
        self._lengths, self._held = self._count(), list(self._members())

    def _count(self) -> list[list[int]]:
        return [list(map(kind.__len__, each)) for kind, each in self._containers.items()]

    def _members(self) -> Iterator[Any]:
        each = [map(kind.__iter__, containers) for kind, containers in self._filled.items()]
        members = chain.from_iterable([*each, map(dict.values, self._filled[dict])])
        return chain(map(gradient_of, self._tensors), chain.from_iterable(members))


def _changes(place: Place) -> Iterator[Change]:
    source, held, now = place.source, place.held, place.now()
    kind: Literal["attribute", "generator", "global"] = "attribute" if place.followed else "global"
    if isinstance(source, GENERATORS):
        kind = "generator"
    if held is None or now is None or (isinstance(source, list) and len(held) != len(now)):
        if held is not now:
            yield Change(place.path, kind)
        return
    for key in held | now:
        old, new = held.get(key, ABSENT), now.get(key, ABSENT)
        if not _same(old, new) and not _is_note(key, old, new):
            undo = (source, key, old, new) if isinstance(source, dict | list) else ()
            yield Change(place.path + place.label(key), kind, source, *undo)


def _is_note(key: Any, old: Any, new: Any) -> bool:
    """Whether the change does not count: an import, a note of Python or torch.compile, a weak reference that died."""
    if new is ABSENT:  # if the object was dropped on purpose, what held it has changed too
        return any(issubclass(type(part), weakref.ref) and weakref.ref.__call__(part) is None for part in (key, old))
    if old is ABSENT:
        return type(new) is ModuleType or (type(key) is str and key.startswith(_NOTES))
    return type(new) is FunctionType and str(new.__globals__.get("__name__")).startswith("torch._dynamo.")


def _put(holder: Any, key: Any, value: Any) -> None:
    if value is ABSENT:
        holder.pop(key, None)
    else:
        holder[key] = value


def _same(old: Any, new: Any) -> bool:
    """Whether two values are one object, or equal and immutable. No method of a user's class is called."""
    kind = type(old)
    if old is new or kind is not type(new):
        return old is new
    if is_atom(old) or (issubclass(kind, np.generic) and kind is not np.void):
        return repr(old) == repr(new)  # unlike with ==, -0.0 differs from 0.0, and nan equals nan
    return kind is tuple and len(old) == len(new) and all(map(_same, old, new))
