"""The objects that can be reached from a module, and the places where they hold others.

The walk follows attributes, slots, containers, the attributes of classes, and functions with their closures, defaults
and the globals that they name. Objects written in C are described by what the garbage collector finds in them, and by
what they would be pickled as. Modules that code names, and classes of libraries, are compared but not followed. The
walk calls no method of a user's class, and continues if an object cannot be read.
"""

import contextvars
import dis
import functools
import gc
import logging
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dp_lightning.privacy.isolation.contents import GENERATORS, generator_state
from dp_lightning.torch_internals import MODULE_MEMBERS, CachedFunction, gradient_of

Ignored: TypeAlias = Callable[[object, str], bool]
NamesOf: TypeAlias = Callable[[Any], Collection[str]]
Members: TypeAlias = dict[Any, Any]
Answer = TypeVar("Answer")

#: Types whose values cannot change, and refer to nothing that can.
ATOMS = (int, float, complex, bool, str, bytes, type(None), range, torch.Size, torch.dtype, torch.device)
# Classes are told apart by what they are: a metaclass may say that they are equal, or that they have no hash.
_IDS_OF_ATOMS = frozenset(map(id, ATOMS))
# Compared by identity only: what they refer to belongs to the process rather than to the model.
_NOT_FOLLOWED: tuple[type, ...] = (types.ModuleType, types.CodeType, types.FrameType, logging.Logger, weakref.ref)
_NOT_FOLLOWED += (np.generic, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)
_LIBRARIES = {"dp_lightning", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch", "torchmetrics"}
_LIBRARIES |= sys.stdlib_module_names
_OF_MODELS = {"einops", "monai", "opacus", "peft", "timm", "torchvision", "transformers"}  # with many globals
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_STATE = ("__reduce_ex__", "__reduce__", "__getstate__", "getstate", "tobytes", "digest")


@dataclass(slots=True, eq=False)
class Place:
    """Where an object holds others: its attributes, its items, the variables of a function.

    Attributes:
        path: the path of the object.
        source: what is read, such as a dict, a list, or the cell of a closure.
        read: returns the members in the source as a dict.
        label: what the key of a member adds to the path.
        followed: whether the walk follows the members.
        held: the members when the place was found; None where they could not be read.
    """

    path: str
    source: Any
    read: Callable[[Any], Members]
    label: Callable[[Any], str]
    followed: bool = True
    held: Members | None = field(init=False)

    def __post_init__(self) -> None:
        self.held = self.now()

    def now(self) -> Members | None:
        try:
            return self.read(self.source)
        except Exception:  # a user's object may raise anything; an empty slot raises too
            return None

    def restore(self) -> None:
        """Put back the members that were held, if that can be done; a functools cache is emptied."""
        source, held, now = self.source, self.held, self.now() or {}
        if held is None:
            if isinstance(source, types.CellType):  # its variable had no value
                del source.cell_contents
        elif isinstance(source, dict | type):
            base = type if isinstance(source, type) else in_c(source)
            put, remove = ("__setattr__", "__delattr__") if base is type else ("__setitem__", "__delitem__")
            for key in now.keys() - held.keys():
                getattr(base, remove)(source, key)
            for key in [key for key in held if key not in now or now[key] is not held[key]]:
                getattr(base, put)(source, key, held[key])
        elif isinstance(source, list):
            list.__setitem__(source, slice(None), held.values())
        elif isinstance(source, set):
            set.clear(source)
            set.update(source, held)
        elif isinstance(source, deque):
            deque.clear(source)
            deque.extend(source, held[""])
        elif isinstance(source, types.CellType):
            source.cell_contents = held[""]
        elif isinstance(source, CachedFunction):
            source.cache_clear()


def is_atom(value: object) -> bool:
    """Whether its type is one of ``ATOMS``."""
    return id(type(value)) in _IDS_OF_ATOMS


def by_class(answer: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Keep the answers of a function of a class."""
    known: dict[int, tuple[type, Answer]] = {}  # with the class, so that its id is not reused

    @functools.wraps(answer)
    def ask(kind: type) -> Answer:
        if (found := known.get(id(kind))) is None:
            found = known[id(kind)] = kind, answer(kind)
        return found[1]

    return ask


def nothing_ignored(owner: object, name: str) -> bool:
    return False


def no_names(owner: object) -> Collection[str]:
    return ()


def attributes_named(names: Collection[str], path: str, value: Any) -> Iterator[Place]:
    """The attributes of these names, and what lists, dicts and sets among them hold; nothing else is followed."""
    own = in_c(value).__getattribute__(value, "__dict__")  # type: ignore[call-arg]
    yield Place(path, own, functools.partial(_chosen, names), _attribute, followed=False)
    contents = functools.partial(_contents_of, names, own)
    yield Place(path, value, contents, lambda name: f".{name}[]", followed=False)


def reachable(
    root: object, ignored: Ignored = lambda owner, name: False, name: str = "model"
) -> Iterator[tuple[str, object]]:
    """Every object that a ``StateSnapshot`` looks at, with a shortest path to it."""
    return ((path, value) for path, value, _ in walk({name: root}, ignored))


def walk(roots: Mapping[str, object], ignored: Ignored) -> Iterator[tuple[str, object, list[Place]]]:
    """Each object that can be reached from the roots, once, with a shortest path to it and its places."""
    queue: deque[tuple[str, Any]] = deque(roots.items())  # breadth first: no other path is shorter
    seen: Members = {}  # keeps temporary objects alive, so that no id is reused
    named: set[tuple[int, str]] = set()
    own = {_package(kind) for root in roots.values() for kind in _kinds(root)} - _LIBRARIES - _OF_MODELS
    while queue:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        places: list[Place] = []
        with suppress(Exception):  # the places found before the error are kept
            places.extend(_places(path, value, ignored, named, own))
        seen.update((id(place.source), place.source) for place in places)
        yield path, value, places
        for place in places:
            members = (place.held or {}).items() if place.followed else ()
            parts = ((key, part) for key, member in members for part in (key, member) if not is_atom(part))
            for key, part in parts:
                if id(part) in seen:
                    continue
                if type(part) is tuple and all(map(is_atom, part)):  # a data set may have a million of them
                    seen[id(part)] = part
                    yield place.path + place.label(key), part, []
                else:
                    queue.append((place.path + place.label(key), part))
        queue.append((type(value).__name__, type(value)))


def _kinds(root: Any) -> Iterator[Any]:
    """Classes and functions whose packages are the user's own, installed or not."""
    if isinstance(root, nn.Module):
        yield from (base for part in root.modules() for base in type(part).__mro__)
    else:
        yield root if isinstance(root, types.FunctionType | types.MethodType) else type(root)


def _package(kind: Any) -> str:
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _places(
    path: str, value: Any, ignored: Ignored, named: set[tuple[int, str]], own: Collection[str]
) -> Iterator[Place]:
    kind = type(value)
    if value is sys.modules:
        yield Place(path, value, dict, _item, followed=False)
    elif kind is dict or kind is OrderedDict or kind is set or kind is list:  # first, since an nn.Module has 14 of them
        yield from _items(path, value)
    elif issubclass(kind, type):
        yield from _class_attributes(value, ignored)
    elif kind is types.ModuleType:
        if not _is_library(value.__name__, own):
            yield Place(path, vars(value), dict, _attribute)
    elif not issubclass(kind, _NOT_FOLLOWED):
        yield from _attributes(path, value, ignored)
        if issubclass(kind, Tensor):
            if not ignored(value, "grad"):
                yield Place(path, value, lambda tensor: {"grad": gradient_of(tensor)}, _attribute)
        elif kind is not types.FunctionType:
            yield from _items(path, value)
        else:
            yield from _variables(path, value)
            yield from _globals(value, named, own)


def _attributes(path: str, value: Any, ignored: Ignored) -> Iterator[Place]:
    with suppress(AttributeError):
        own = in_c(value).__getattribute__(value, "__dict__")  # type: ignore[call-arg]
        parts = MODULE_MEMBERS if issubclass(type(value), nn.Module) else ()
        for names in (*(own[part] for part in parts if part in own and not ignored(value, part)), own):
            yield Place(path, names, functools.partial(_kept, owner=value, ignored=ignored), _attribute)
    for name, slot in _slots(type(value)).items():
        if not ignored(value, name):
            yield Place(f"{path}.{name}", slot, lambda slot: {"": slot.__get__(value)}, _itself)


def _kept(names: Mapping[str, Any], owner: object, ignored: Ignored) -> Members:
    return {key: value for key, value in names.items() if not ignored(owner, _name_in(key))}


def _name_in(key: Any) -> str:
    """The name that a key of a dict of attributes is, whatever a subclass of str says; none for other keys."""
    return str.__str__(key) if isinstance(key, str) else ""


def in_c(value: Any) -> type:
    """The nearest base class that is written in C; ``object`` if all others are written in Python."""
    return _base_in_c(type(value))


@by_class
def _base_in_c(kind: type) -> type:
    return next(base for base in kind.__mro__ if base.__flags__ & _IMMUTABLE)


@by_class
def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    if kind is types.FunctionType or kind is types.GeneratorType:
        return {}
    members = (item for base in reversed(kind.__mro__) for item in vars(base).items())
    slots = {name: member for name, member in members if type(member) is types.MemberDescriptorType}
    return {name: member for name, member in slots.items() if not name.endswith("offset__")}  # members of C's own


def _items(path: str, value: Any) -> Iterator[Place]:
    for kinds, label, read in _ITEMS:
        if issubclass(type(value), kinds):
            yield Place(path, value, read, label)
            return
    if in_c(value) is not object:
        yield Place(path, value, _described, _itself)


def _described(value: Any) -> Members:
    """What an object written in C refers to, and its state: a position, or bytes."""
    parts: Members = {id(part): part for part in gc.get_referents(value)}
    return parts | {"": _fixed(_pickled(value), parts)}


def _pickled(value: Any) -> Any:
    base = in_c(value)
    names = [name for name in _STATE if getattr(base, name, None) is not getattr(object, name, None)]
    if not names or base.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return None
    arguments = (4,) if names[0] == "__reduce_ex__" else ()
    quiet = warnings.catch_warnings(action="ignore") if base.__module__ == "itertools" else nullcontext()
    with quiet, suppress(TypeError):
        return getattr(base, names[0])(value, *arguments)


def _fixed(part: Any, known: Members) -> Any:
    """The part, with tuples instead of the containers and iterators that each call makes anew."""
    if id(part) in known:
        return part
    if type(part) is list or type(part) is tuple or type(part) is dict:
        parts = part.items() if type(part) is dict else part
        return tuple(_fixed(item, known) for item in parts)
    if issubclass(type(part), Iterator) and in_c(part) is type(part):
        return tuple(_described(part).items())
    return part


def _class_attributes(kind: type, ignored: Ignored) -> Iterator[Place]:
    if kind.__flags__ & _IMMUTABLE:
        return
    if str(kind.__module__).partition(".")[0] in _LIBRARIES:
        yield Place(kind.__name__, kind, lambda kind: dict(vars(kind)), _attribute, followed=False)
    else:
        yield Place(kind.__name__, kind, lambda kind: _kept(vars(kind), kind, ignored), _attribute)
    yield Place(kind.__name__, kind.__bases__, lambda bases: dict(enumerate(bases)), _itself)


def _variables(path: str, function: types.FunctionType) -> Iterator[Place]:
    yield Place(f"{path}.__defaults__", function, lambda _: {"": function.__defaults__}, _itself)
    yield Place(f"{path}.__kwdefaults__", function, lambda _: {"": function.__kwdefaults__}, _itself)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Place(f"{path}.{name}", cell, lambda cell: {"": cell.cell_contents}, _itself)


def _globals(function: types.FunctionType, named: set[tuple[int, str]], own: Collection[str]) -> Iterator[Place]:
    """The module of a user's function and the modules that it names, with those of their members that it names."""
    module, space = str(function.__globals__.get("__name__")), function.__globals__
    if _is_library(module, own):
        return
    names, spaces = _names(function.__code__), {id(space): (module, space)}
    for key in (todo := [id(space)]):
        module, space = spaces[key]
        wanted = _globals_in(function.__code__) if space is function.__globals__ else names
        if (key, "") not in named:
            named.add((key, ""))
            yield Place(module, space, dict, _attribute, followed=False)
        found = {name: space[name] for name in sorted(wanted & space.keys())}
        for value in found.values():
            if type(value) is types.ModuleType and id(vars(value)) not in spaces:
                spaces[id(vars(value))] = value.__name__, vars(value)
                todo.append(id(vars(value)))
        new = {name: value for name, value in found.items() if (key, name) not in named}
        named.update((key, name) for name in new)
        if _is_library(module, own):
            yield from _of_library(module, new)
        else:  # only the members that are named count
            modules = [name for name in new if type(new[name]) is types.ModuleType]
            for group in (modules, [name for name in new if name not in modules]):
                yield Place(module, space, functools.partial(_chosen, group), _attribute, followed=group is not modules)


def _chosen(names: Collection[str], space: Members) -> Members:
    return {name: space[name] for name in names if name in space}


def _contents_of(names: Collection[str], space: Members, owner: object) -> Members:
    return {
        name: tuple(part for pair in read(value).items() for part in pair)
        for name, value in _chosen(names, space).items()
        for kinds, _, read in _CONTAINERS
        if issubclass(type(value), kinds)
    }


def _of_library(module: str, named: Members) -> Iterator[Place]:
    """Its classes and collections, such as ``os.environ``; attributes that were set on its functions and loggers."""
    kept = {name: value for name, value in named.items() if isinstance(value, type | list | set | MutableMapping)}
    if kept:
        yield Place(module, tuple(kept), lambda _: kept, _attribute)
    functions = [(name, value) for name, value in named.items() if type(value) is types.FunctionType]
    loggers = {"root": logging.root, **logging.root.manager.loggerDict} if module == "logging" else {}
    for name, value in (*functions, *loggers.items()):
        yield Place(f"{module}.{name}", vars(value), dict, _attribute, followed=False)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in the code."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    found = (step.argval for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME")))
    inner = (_globals_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(found).union(*inner)


def _is_library(module: str, own: Collection[str]) -> bool:
    package, path = module.partition(".")[0], str(getattr(sys.modules.get(module), "__file__", None))
    return package in _LIBRARIES or (package not in own and ("site-packages" in path or "dist-packages" in path))


def _attribute(name: Any) -> str:
    return f"[{name}]" if str(name).isdigit() else f".{name}"


def _item(key: Any) -> str:
    return f"[{key!r}]" if is_atom(key) else f"[{type(key).__name__}]"


def _itself(key: Any) -> str:
    return ""


def _frame(generator: "types.GeneratorType[Any, Any, Any]") -> Members:
    frame = generator.gi_frame
    variables = () if frame is None else (frame.f_lasti, *frame.f_locals.values())
    return {"": (generator.gi_yieldfrom, *variables)}


# How to read containers, and objects for which ``_described`` would leave something out.
_CONTAINERS: list[tuple[Any, Callable[[Any], str], Callable[[Any], Members]]] = [
    (dict, _item, lambda value: dict(dict.items(value))),
    (list, _item, lambda value: dict(enumerate(list.__iter__(value)))),
    (tuple, _item, lambda value: dict(enumerate(tuple.__iter__(value)))),
    (set | frozenset, _itself, lambda value: dict.fromkeys(frozenset(value))),
]
_ITEMS = [
    *_CONTAINERS,
    (deque, _itself, lambda value: {"": tuple(deque.__iter__(value))}),
    (GENERATORS, _itself, lambda value: {"": generator_state(value)}),
    (np.ndarray, _attribute, lambda value: {"base": value.base}),
    (types.GeneratorType, _itself, _frame),
    (contextvars.ContextVar, _itself, lambda value: {"": value.get(value)}),
]
