"""Watches a loss that runs without vmap, on one example after the other, through the torch functions that it calls."""

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.functions import collect, writes
from dp_lightning.torch_internals import storage_address

# Later versions of Python move objects between generations in other ways.
_GENERATIONS = sys.version_info < (3, 14)


class Watch(TorchFunctionMode):
    """Watches code that runs without vmap, on one example after the other.

    It refuses earlier tensors that are not constants, including those of an earlier example, and keeps the value of a
    buffer from before it is written to.

    Args:
        is_known: whether a tensor is a constant.
        older: tensors that are refused, by id.
        storages: those of the buffers whose value is kept.
    """

    def __init__(
        self,
        is_known: Callable[[Tensor], bool],
        older: dict[int, weakref.ref[Tensor]],
        storages: Collection[int | None],
    ) -> None:
        super().__init__()
        self._is_known = is_known
        self._older = older
        self._storages = storages
        self._made: list[weakref.ref[Tensor]] = []
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def end_example(self) -> dict[int, tuple[Tensor, Tensor]]:
        """End an example, whose tensors are refused from here on.

        Returns:
            By each storage that was written to: a tensor over all of the memory, and its value before.
        """
        alive = [tensor for ref in self._made if (tensor := ref()) is not None and not self._is_known(tensor)]
        self._older.update((id(tensor), weakref.ref(tensor)) for tensor in alive)
        self._made.clear()
        written, self._written = self._written, {}
        return written

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used: list[Tensor] = []
        collect((args, kwargs), used)
        for tensor in used:
            older = self._older.get(id(tensor))
            if older is not None and older() is tensor:
                raise ModelError(
                    f"training_step uses a tensor of shape {tuple(tensor.shape)} that is not a parameter or a buffer "
                    "and was not made in this step, so it may hold other examples. If it holds nothing of the "
                    "training data, make it a buffer of the module."
                )
        if writes(func):
            self._keep(args[:1])
        if "out" in kwargs:
            self._keep((kwargs["out"],))
        result = func(*args, **kwargs)
        self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Note that the tensors in a result belong to this example."""
        if isinstance(result, Tensor):
            self._made.append(weakref.ref(result))
        elif isinstance(result, (list, tuple)):
            for part in result:
                self.note(part)

    def _keep(self, values: tuple[Any, ...]) -> None:
        targets: list[Tensor] = []
        collect(values, targets)
        for target in targets:
            storage = storage_of(target)
            if storage is not None and storage in self._storages and storage not in self._written:
                whole = torch.empty(0, dtype=target.dtype, device=target.device).set_(target.untyped_storage())
                self._written[storage] = (whole, whole.clone())


class UnknownTensors:
    """The tensors of the process that are not constants, found through the garbage collector.

    Looking at all objects of the process takes a tenth of a second or more. An object that was made after the last look
    is in the collector's two younger generations, unless these have been collected together since.

    Args:
        is_known: whether a tensor is a constant.
    """

    def __init__(self, is_known: Callable[[Tensor], bool]) -> None:
        self._is_known = is_known
        self._found: dict[int, weakref.ref[Tensor]] = {}
        self._collections: list[int] = []

    def tensors(self) -> dict[int, weakref.ref[Tensor]]:
        """The tensors that exist now, by id."""
        tensors = _young_tensors()
        now = [generation["collections"] for generation in gc.get_stats()[1:]]
        if not _GENERATIONS or now != self._collections:
            tensors = all_tensors()
        self._collections = now
        self._found = {key: ref for key, ref in self._found.items() if ref() is not None}
        for value in tensors:
            if not self._is_known(value):
                self._found[id(value)] = weakref.ref(value)
        return dict(self._found)


def all_tensors() -> list[Tensor]:
    """All tensors of the process.

    They are found by their classes. The list of all objects may contain a tuple that another thread is building, which
    Python cannot finish while something else holds it.
    """
    kinds: list[type] = [Tensor]
    for kind in kinds:  # the list grows by their subclasses
        kinds += type.__subclasses__(kind)
    return [value for value in gc.get_referrers(*kinds) if issubclass(type(value), Tensor)]


def _young_tensors() -> list[Tensor]:
    """The tensors in the garbage collector's young generations."""
    return [value for value in gc.get_objects(0) + gc.get_objects(1) if issubclass(type(value), Tensor)]


def memory_of(tensor: Tensor) -> int:
    """A number that identifies the memory of a tensor; views share that of their base."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:  # sparse tensors and wrappers raise different errors
        return id(tensor)


def storage_of(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if it has none of its own."""
    try:
        return storage_address(tensor)
    except Exception:  # as above
        return None
