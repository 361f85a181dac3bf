"""Reads each example separately, so that none can reach another before the step.

The data set's ``__getitem__`` is called for one example, or K times for its K views, and collation on that alone: a
batch of one example. The results of a physical batch are stacked. ``__getitems__``, which gets several examples, is not
used. Where an example is a person, it is some of the person's elements, drawn for each step (``groups``).
``__getitem__`` is trusted to look at one element, and may keep caches in the data set. Collation and hooks keep
nothing: what they lead to is compared after each physical batch. Where plain values have changed, they are put back and
the batch is read again, with that comparison after each example; anything else is refused.
"""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dp_lightning.errors import DataError, DpLightningError, ModelError
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.isolation.reachable import Ignored, in_c, nothing_ignored, reachable
from dp_lightning.privacy.isolation.state import StateSnapshot
from dp_lightning.privacy.sampling import PhysicalBatch
from dp_lightning.processors import sent
from dp_lightning.torch_internals import PARAMETERS, TreeSpec, tree_flatten, tree_unflatten


class ExampleBatch:
    """A physical batch as it was read.

    Attributes:
        place: its place among the draws, and its examples' positions in the data set.
        examples: a tree like a batch of one example, with tensors (b, ...) in the place of tensors, or with ``Entries``
            in the place of what is no tensor; b is at least 1.
        counted: (b,) whether each example takes part, on the CPU. One that is None or that collation leaves out does
            not, nor one that only stands in. Those are synthetic: ones where numbers are floating-point, and zeros.
    """

    def __init__(self, place: PhysicalBatch, examples: Any, counted: Tensor) -> None:
        self.place, self.examples, self.counted = place, examples, counted

    def __len__(self) -> int:
        return len(self.counted)

    def to(self, device: torch.device, non_blocking: bool = False) -> "ExampleBatch":
        """The same on a device; ``non_blocking`` makes no difference, since nothing waits for a GPU."""
        return self._changed(lambda leaf: sent(leaf, device))

    def pin_memory(self) -> "ExampleBatch":
        """The same in page-locked memory."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "ExampleBatch":
        return ExampleBatch(self.place, _with_tensors(change, self.examples), self.counted)


class Entries(tuple[Any, ...]):
    """What each example has in one place of its batch where no tensor stands; a leaf of the tree."""

    __slots__ = ()


class ExampleReader(Dataset[ExampleBatch]):
    """From a physical batch's place to its examples; picklable, for the workers of a loader.

    Args:
        dataset: a map-style data set.
        collate_fn: makes a batch of one example, from a list of its views.
        augmult: K, how often the data set is asked for each element.
        groups: the persons of the data set, where an example is a person; None where it is an element.
        prepare: applied to each example's batch before examples are stacked.
        before: called with the place before anything is read; it may fix the random numbers.
        ignored: asked with an object and the name of one of its attributes, whether it is no state.
        synthetic_first: whether each logical step begins with a synthetic example, which does not take part.
        filled_to: so many examples has every physical batch; those that are missing are synthetic ones, which do not
            take part. None leaves each as it was cut.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        *,
        augmult: int = 1,
        groups: Groups | None = None,
        prepare: Callable[[Any], Any] | None = None,
        before: Callable[[PhysicalBatch], None] | None = None,
        ignored: Ignored = nothing_ignored,
        synthetic_first: bool = False,
        filled_to: int | None = None,
    ) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.augmult, self.groups, self.prepare, self.before = augmult, groups, prepare, before
        self._ignored, self._each, self._synthetic_first = ignored, False, synthetic_first
        self._stand_in: Any = None
        self._filled_to = filled_to or 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_watch"}

    def __len__(self) -> int:
        return len(self.dataset if self.groups is None else self.groups)

    def __getitem__(self, place: PhysicalBatch) -> ExampleBatch:
        found = self._read_all(place)
        if all(example is None for example in found):
            found = [None]
        elif self._synthetic_first and place.piece == 0:
            found = [None, *found]
        found += [None] * (self._filled_to - len(found))
        counted = torch.tensor([example is not None for example in found])
        if any(example is None for example in found):
            stand_in = next((_synthetic(example) for example in found if example is not None), None)
            stand_in = self.stand_in(place.step) if stand_in is None else stand_in
            found = [stand_in if example is None else example for example in found]
        return ExampleBatch(place, stacked(found), counted)

    def elements(self, index: int, step: int) -> list[int]:
        """The places in the data set of what an example consists of in a logical step."""
        return [index] if self.groups is None else self.groups.draw(index, step)

    def read(self, index: int, step: int) -> Any:
        """The batch of one example in a logical step; None where a view of it is None, or collation leaves nothing.

        Raises:
            DataError: where ``collate_fn`` does not take a list of one example.
        """
        views = [self.dataset[element] for element in self.elements(index, step) for _ in range(self.augmult)]
        if any(view is None for view in views):  # as a data set gives what it cannot read
            return None
        with self.nothing_kept() if self._each else nullcontext():
            batch = self._collated(views)
            if _is_empty(batch):
                return None
            return batch if self.prepare is None else self.prepare(batch)

    def _collated(self, views: list[Any]) -> Any:
        try:
            return self.collate_fn(views)
        except DpLightningError:
            raise
        except Exception as error:  # it is the user's own code
            raise DataError(
                f"collate_fn fails ({type(error).__name__}: {error}). It gets one example at a time, here a list of "
                f"length {len(views)}: return a batch of that example, or None to leave it out."
            ) from error

    def _read_all(self, place: PhysicalBatch) -> list[Any]:
        if self.before is not None:
            self.before(place)
        with nullcontext() if self._each else self.nothing_kept():
            each, found = self._each, [self.read(index, place.step) for index in place.indices]
        return found if each == self._each else self._read_all(place)

    @contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """Around collation and hooks: plain values that they have changed are put back.

        Raises:
            ModelError: naming what else they have changed.
        """
        if self._watch is not None:
            self._watch.refresh()
        yield
        if self._watch is not None and self._watch.undo():
            self._each = True

    @cached_property
    def _watch(self) -> "_Watch | None":
        functions = {"collate_fn": self.collate_fn, "on_before_batch_transfer": self.prepare}
        own = {name: function for name, function in functions.items() if function not in (None, default_collate)}
        return _Watch(own, self.dataset, self._ignored) if own else None

    def stand_in(self, step: int) -> Any:
        """A batch of one synthetic example."""
        if self._stand_in is None:
            found = (self.read(index, step) for index in range(len(self)))
            with self.nothing_kept():
                example = next((example for example in found if example is not None), None)
            if example is None:
                raise DataError("Every example of the training set is None, or collation leaves nothing of it.")
            self._stand_in = _synthetic(example)
        return self._stand_in


class _Watch:
    """Compares what is reachable from collation and hooks, parameters and the data set's own state left out.

    Args:
        functions: by name.
        dataset: what only it leads to is trusted, and so are its arrays.
        ignored: as in ``ExampleReader``.
    """

    def __init__(self, functions: Mapping[str, object], dataset: object, ignored: Ignored) -> None:
        arrays = {id(value): value for _, value in reachable(dataset) if isinstance(value, Tensor | np.ndarray)}

        def left_out(owner: object, name: str) -> bool:
            value = getattr(owner, "__dict__", {}).get(name)
            data = isinstance(owner, Dataset | DataLoader) or value is dataset or id(value) in arrays
            return data or (isinstance(owner, nn.Module) and name == PARAMETERS) or ignored(owner, name)

        (name, root), *others = functions.items()
        self._snapshot = StateSnapshot(root, left_out, name=name, also=dict(others))

    def refresh(self) -> None:
        """From here on, compare with what is now."""
        self._snapshot.refresh()

    def undo(self) -> bool:
        """Put plain values back; whether there were any.

        Raises:
            ModelError: naming what else has changed.
        """
        changes = [change for change in self._snapshot.changes() if change.kind in ("attribute", "tensor")]
        if names := [change.path for change in changes if not change.is_plain]:
            raise ModelError(
                f"Reading an example changes {', '.join(names[:5])}. What collate_fn and on_before_batch_transfer "
                "keep of it could reach other examples. Make what they need before the fit, or keep it in the data set."
            )
        for change in changes:
            warnings.warn(f"Reading an example changes {change.path}. The change is undone each time.", stacklevel=2)
            change.undo()
        return bool(changes)


@dataclass(frozen=True)
class Structure:
    """How a tree is put together. It says nothing of what its leaves hold.

    Attributes:
        spec: that of torch.
        parts: what torch finds at the ends of it: the dtype of a tensor, None for None, the class of an object that is
            opened and the structure of its attributes, and "entry" for anything else.
    """

    spec: TreeSpec
    parts: tuple[Any, ...]


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree: those of torch, with a UserDict or a dataclass opened, and without None."""
    ends, spec = tree_flatten(tree)
    leaves, parts = [], []
    for end in ends:
        inner, part = _opened(end)
        leaves.extend(inner)
        parts.append(part)
    return leaves, Structure(spec, tuple(parts))


def _opened(end: Any) -> tuple[list[Any], Any]:
    """Its leaves, and what ``Structure.parts`` says of it."""
    if end is None:
        return [], None
    if isinstance(end, Tensor):
        return [end], end.dtype
    if (isinstance(end, UserDict) or is_dataclass(end)) and in_c(end) is object:
        leaves, structure = flatten(_attributes(end))
        return leaves, (type(end), structure)
    return [end], "entry"


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    """The tree of these leaves, with new objects of the same classes."""
    return _built(iter(leaves), structure)


def _built(leaves: Iterator[Any], structure: Structure) -> Any:
    ends = []
    for part in structure.parts:
        if isinstance(part, tuple):
            kind, inner = part
            made = object.__new__(kind)
            for name, value in _built(leaves, inner).items():
                object.__setattr__(made, name, value)
            ends.append(made)
        else:
            ends.append(None if part is None else next(leaves))
    return tree_unflatten(ends, structure.spec)


def _attributes(value: object) -> dict[str, Any]:
    """Those in its ``__dict__`` and in slots."""
    state = object.__getstate__(value)
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(own or {}), **(slots or {})}


def _with_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    leaves, structure = flatten(tree)
    return unflatten([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def stacked(examples: Sequence[Any]) -> Any:
    """Batches of one example each as one tree of tensors (b, ...).

    Raises:
        DataError: when examples differ in structure or in shape.
    """
    flat = [flatten(example) for example in examples]
    structure = flat[0][1]
    for _, other in flat:
        require_structure(other, structure)
    return unflatten([_stacked(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)], structure)


def form_of(batch: ExampleBatch) -> tuple[Structure, list[tuple[int, ...]]]:
    """The structure of one example, and the shapes that its tensors have."""
    leaves, structure = flatten(batch.examples)
    return structure, [tuple(leaf.shape[1:]) for leaf in leaves if isinstance(leaf, Tensor)]


def require_structure(found: Structure, expected: Structure) -> None:
    """Refuse examples of another structure.

    Raises:
        DataError: with the fix.
    """
    if found != expected:
        raise DataError(
            "Examples of the training set have batches of different structure. Let collate_fn return the same keys, "
            "lengths, classes and types of numbers for every example, and None for all of them or for none."
        )


def require_shapes(found: object, expected: object) -> None:
    """Refuse examples of another shape.

    Raises:
        DataError: naming the shapes.
    """
    if found != expected:
        raise DataError(
            f"Examples of the training set have different shapes: {expected} and {found}. Bring all of them to one "
            "shape: pad or crop to a fixed length, in the data set or in collate_fn. A shape that depends on the "
            "example would leave the step."
        )


def _stacked(column: Sequence[Any]) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return Entries(column)
    tensors = [leaf.as_subclass(Tensor) for leaf in column]
    for tensor in tensors:
        require_shapes(tuple(tensor.shape), tuple(tensors[0].shape))
    return torch.stack(tensors)


def _synthetic(example: Any) -> Any:
    """Of its structure and shapes: a one has a norm and a logarithm, a zero is an index."""
    return _with_tensors(lambda leaf: torch.full_like(leaf, leaf.is_floating_point()), example)


def _is_empty(batch: Any) -> bool:
    leaves, _ = flatten(batch)
    return not leaves or all(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == 0 for leaf in leaves)
