"""Keeps the training set out of reach while a loss is computed, and other data sets that are not compared as state.

A module may hold its training set, as one with a ``train_dataloader`` does. While a loss runs, each data set has a
class that refuses every use by the loss's thread, however it is reached. Other Python threads, such as one in which a
data set reads ahead, may use it. Arrays and lists cannot be closed like this, so a module must not hold those that
contain the examples.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dp_lightning.errors import ModelError
from dp_lightning.privacy.isolation.reachable import Ignored, by_class, walk
from dp_lightning.torch_internals import ForeignThread

_FIX = (
    "The step would see raw examples other than its own. Put what it needs to know about the data set, such as the "
    "number of classes, into an attribute of the module."
)

# By which an object is used, without the underscores.
_USES: tuple[str, ...] = ("getattribute", "setattr", "delattr", "getitem", "setitem", "delitem", "len", "iter")
_USES += ("contains", "add", "call")

_RUNS_A_LOSS = threading.local()


class SealedData:
    """The training set and other data sets, and what they are made of.

    Args:
        roots: the objects from which it is reached.
        num_train: number of examples N; an object with fewer elements does not hold them.
        module: the module that is trained; a loader may refer to it, and what the module holds is not the data.
        ignored: attributes that are not followed.
    """

    def __init__(self, roots: tuple[object, ...], num_train: int, module: nn.Module, ignored: Ignored) -> None:
        parts = {id(part) for part in module.modules()}
        self._held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

        def outside(owner: object, name: str) -> bool:
            return id(owner) in parts or ignored(owner, name)

        self._objects: dict[int, tuple[Any, type]] = {}
        self._arrays: dict[int, object] = {}
        #: Tensors that are reached from the roots.
        self.tensors: list[Tensor] = []
        self._memory: list[tuple[int, int]] = []  # where tensors and arrays begin and end
        for _, value, places in walk({str(place): root for place, root in enumerate(roots)}, outside):
            # A dict of attributes, too: the walk goes through it to them, and the module may hold it.
            dicts = [place.source for place in places if isinstance(place.source, dict)]
            self._arrays |= {id(names): names for names in dicts if len(names) >= num_train}
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, Dataset | DataLoader) or _length(value) >= num_train:
                kind = type(value)
                if _close(value):
                    _open(value, kind)
                    self._objects[id(value)] = value, kind
                else:
                    self._arrays[id(value)] = value
            if isinstance(value, Tensor | np.ndarray):
                self._memory.append(_bounds(value))

    @property
    def objects(self) -> list[object]:
        """The data sets, which have another class while a loss runs."""
        return [value for value, _ in self._objects.values()]

    def __contains__(self, value: object) -> bool:
        return id(value) in self._objects

    def require_not_in(self, roots: Mapping[str, object], ignored: Ignored) -> None:
        """Refuse objects that hold the examples and whose use cannot be seen.

        Raises:
            ModelError: naming the attribute.
        """
        for path, value, _ in walk(roots, ignored):
            if id(value) in self._arrays or self._has_memory(value):
                raise ModelError(
                    f"{path} is shared with the training set and may hold its examples ({type(value).__name__} of "
                    f"{_length(value)}). Through it training_step would see raw examples other than its own, "
                    "unnoticed. Keep examples only in a torch.utils.data.Dataset. If it holds none and is public, "
                    "such as a vocabulary, class names or a mean, give the module a copy: dict(vocabulary), "
                    "list(names), mean.clone()."
                )

    def _has_memory(self, value: object) -> bool:
        """Whether an array, a parameter or a buffer shares memory with the data. The use of other tensors is seen."""
        if not (isinstance(value, np.ndarray) or id(value) in self._held):
            return False
        (start, end), known = _bounds(value), np.array(self._memory or [(0, 0)], dtype=np.uint64)  # type: ignore[arg-type]
        return bool(((known[:, 0] < end) & (known[:, 1] > start)).any())

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context around a loss.

        Raises:
            ModelError: if the loss's thread uses a data set.
        """
        _RUNS_A_LOSS.now = True
        try:
            for value, _ in self._objects.values():
                _close(value)
            yield
        finally:
            _RUNS_A_LOSS.now = False
            for value, kind in self._objects.values():
                _open(value, kind)


def _bounds(array: "Tensor | np.ndarray[Any, Any]") -> tuple[int, int]:
    """Where the memory of an array's base begins and ends; zeros if it has none."""
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray | Tensor):
        array = array.base
    try:
        if isinstance(array, Tensor):
            storage = array.untyped_storage()
            start = storage.data_ptr()
            return start, start + (storage.nbytes() if start else 0)
        return array.ctypes.data, array.ctypes.data + array.nbytes
    except Exception:  # sparse tensors and wrappers raise different errors
        return 0, 0


def _length(value: object) -> int:
    """The length of an object that can be indexed and is not a string; 0 for others."""
    if isinstance(value, str | bytes | Enum):
        return 0
    try:
        return len(value) if hasattr(type(value), "__getitem__") and not isinstance(value, nn.Module) else 0  # type: ignore[arg-type]
    except Exception:  # an array without dimensions, or a user's object
        return 0


def _close(value: object) -> bool:
    """Give an object a class that refuses every use by a loss; false if it is written in C."""
    kind: Any = type(value)
    try:
        object.__setattr__(value, "__class__", _closed(kind))
    except Exception:  # classes that cannot be derived from raise different errors
        return False
    return True


def _open(value: object, kind: type) -> None:
    object.__setattr__(value, "__class__", kind)


def _in_a_loss() -> bool:
    """Whether this thread runs a loss, or is not one of Python's, as autograd's for a backward pass on a GPU."""
    return getattr(_RUNS_A_LOSS, "now", False) or isinstance(threading.current_thread(), ForeignThread)


@by_class
def _closed(kind: type) -> type:
    def refused(name: str) -> Callable[..., Any]:
        def use(self: object, *args: Any, **kwargs: Any) -> Any:
            if not _in_a_loss():
                return getattr(kind, name)(self, *args, **kwargs)
            raise ModelError(f"training_step uses a data set ({kind.__name__}). {_FIX}")

        return use

    names = [f"__{name}__" for name in _USES]
    own = [name for name in names if any(name in vars(base) for base in kind.__mro__)]
    return type(kind.__name__, (kind,), {"__slots__": (), **{name: refused(name) for name in own}})
