"""Reads each example separately, so that none can reach another before the step.

The data set's ``__getitem__`` is called for one example, or K times for its K views, and collation on that alone: a
batch of one example. The results of a physical batch are stacked. ``__getitems__``, which gets several examples, is not
used. Tuples of tensors and numbers with torch's own collation are stacked at once, and a TensorDataset is indexed at
once, which gives the same. Where an example is a person, it is some of the person's elements, drawn for each step
(``groups``).
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.sampling import PhysicalBatch
from dp_lightning.processors import sent
from dp_lightning.torch_internals import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one example is read.

    Args:
        collate_fn: makes a batch of one example from a list of its views.
        augmult: K, the views of each element in its batch of one.
        images_per_group: k, where an example is a person: how many elements of a group of the data set are drawn for
            each step, the rows of one example. None where each element is an example.
        prepare: applied to the batch of one example after collation, before examples are stacked.
    """

    collate_fn: Callable[[list[Any]], Any] = default_collate
    augmult: int = 1
    images_per_group: int | None = None
    prepare: Callable[[Any], Any] | None = None


class ExampleBatch:
    """A physical batch as it was read.

    Attributes:
        place: place of the batch among the draws, and positions of its examples in the data set.
        leaves: leaves of the batch of one example, with a tensor (b, ...) for each tensor, and a list of b entries for
            what is no tensor; b is at least 1. The tree is built for one example alone, whose class may check shapes.
        structure: structure of the tree of one example.
        counted: (b,) whether each example takes part, on the CPU. An example that is None, or that collation leaves
            out, does not; a synthetic example stands in: ones in floating-point tensors, and zeros in the others.
    """

    def __init__(self, place: PhysicalBatch, leaves: list[Any], structure: "Structure", counted: Tensor) -> None:
        self.place, self.leaves, self.structure, self.counted = place, leaves, structure, counted

    def __len__(self) -> int:
        return len(self.counted)

    def to(self, device: torch.device) -> "ExampleBatch":
        """The batch on a device."""
        return self._changed(lambda leaf: sent(leaf, device))

    def seen(self) -> str:
        """What a loss sees of the batch, in words."""
        shapes = [str(tuple(leaf.shape[1:])) for leaf in self.leaves if isinstance(leaf, Tensor)]
        return f"a batch of one example, of shape {', '.join(shapes)}"

    def pin_memory(self) -> "ExampleBatch":
        """The batch in page-locked memory; a loader calls this method."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "ExampleBatch":
        leaves = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return ExampleBatch(self.place, leaves, self.structure, self.counted)


class ExampleReader(Dataset[ExampleBatch]):
    """Maps the place of a physical batch to the batch's examples; picklable, for the workers of a loader.

    Args:
        dataset: a map-style data set.
        reading: how an example of the data set is read.
        seed: fixes which elements of a person are drawn; None draws them with a secret key.
        before: called with the place before anything is read, to give generators new keys.
        synthetic_first: whether each logical step begins with a synthetic example, which does not take part.
    """

    def __init__(
        self,
        dataset: Any,
        reading: Reading,
        *,
        seed: int | None = None,
        before: Callable[[PhysicalBatch], None] | None = None,
        synthetic_first: bool = False,
    ) -> None:
        self.dataset, self.reading = dataset, reading
        #: The persons of the data set, where an example is a person; None where an example is an element.
        self.groups = None if reading.images_per_group is None else Groups(dataset, reading.images_per_group, seed=seed)
        self._before, self._synthetic_first = before, synthetic_first
        self._stand_in: Flat | None = None
        #: Whether examples that are tuples of tensors and numbers need no collation of their own.
        self._at_once = reading.collate_fn is default_collate and reading.prepare is None and not synthetic_first
        self._indexed = self._at_once and type(dataset).__getitem__ is TensorDataset.__getitem__
        self._indexed = self._indexed and all(type(column) is Tensor for column in dataset.tensors)

    def __len__(self) -> int:
        return len(self.dataset if self.groups is None else self.groups)

    def __getitem__(self, place: PhysicalBatch) -> ExampleBatch:
        if self._before is not None:
            self._before(place)
        elements = [self._elements(index, place.step) for index in place.indices]
        if self._indexed and elements:
            return _of_columns(place, self.dataset[list(chain.from_iterable(elements))], self._views(elements[0]))
        views = [self._views(each) for each in elements]
        if self._at_once and (columns := _columns(views)) is not None:
            return _of_columns(place, columns, views[0])
        found = [self._collated(each) for each in views]
        if all(example is None for example in found):
            found = [None]
        elif self._synthetic_first and place.piece == 0:
            found = [None, *found]
        counted = torch.tensor([example is not None for example in found])
        examples = [self.stand_in(place.step) if example is None else example for example in found]
        return ExampleBatch(place, *stacked(examples), counted)

    def read(self, index: int, step: int) -> "Flat | None":
        """The batch of one example in a logical step; None where a view of it is None, or collation leaves nothing.

        Raises:
            DataError: where ``collate_fn`` does not take a list of one example.
        """
        return self._collated(self._views(self._elements(index, step)))

    def _elements(self, index: int, step: int) -> list[int]:
        """The place in the data set of each view of an example."""
        elements = [index] if self.groups is None else self.groups.draw(index, step)
        return [element for element in elements for _ in range(self.reading.augmult)]

    def _views(self, elements: list[int]) -> list[Any]:
        return [self.dataset[element] for element in elements]

    def _collated(self, views: list[Any]) -> "Flat | None":
        reading = self.reading
        if any(view is None for view in views):  # as a data set gives what it cannot read
            return None
        try:
            batch = reading.collate_fn(views)
        except DpLightningError:
            raise
        except Exception as error:  # it is the user's own code
            raise DataError(
                f"collate_fn fails ({type(error).__name__}: {error}). It gets one example at a time, here a list of "
                f"length {len(views)}: return a batch of that example, or None to leave it out."
            ) from error
        flat = flatten(batch)
        if all(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == 0 for leaf in flat[0]):
            return None  # as collation that drops the example leaves it: no leaf, or none with a row
        return flat if reading.prepare is None else flatten(reading.prepare(batch))

    def stand_in(self, step: int) -> "Flat":
        """A batch of one synthetic example."""
        if self._stand_in is None:
            found = (self.read(index, step) for index in range(len(self)))
            example = next((example for example in found if example is not None), None)
            if example is None:
                raise DataError("Every example of the training set is None, or collation leaves nothing of it.")
            self._stand_in = _synthetic(example)
        return self._stand_in


@dataclass(frozen=True)
class Structure:
    """How a tree is put together, whatever the numbers in its leaves are.

    Attributes:
        spec: torch's description of the tree.
        parts: what torch finds at the tree's ends: the dtype and the shape of a tensor, None for None, the class of an
            object that is opened and the structure of its attributes, and "entry" for anything else.
    """

    spec: TreeSpec
    parts: tuple[Any, ...]


Flat = tuple[list[Any], Structure]
"""The leaves of a tree, and its structure."""


def flatten(tree: Any) -> Flat:
    """The leaves of a tree: those of torch, with a UserDict or a dataclass opened, and without None."""
    ends, spec = tree_flatten(tree)
    leaves, parts = [], []
    for end in ends:
        inner, part = _opened(end)
        leaves.extend(inner)
        parts.append(part)
    return leaves, Structure(spec, tuple(parts))


def _opened(end: Any) -> tuple[list[Any], Any]:
    """The leaves of an end of a tree, and what ``Structure.parts`` has for this end."""
    if end is None:
        return [], None
    if isinstance(end, Tensor):
        return [end], (end.dtype, tuple(end.shape))
    if (isinstance(end, UserDict) or is_dataclass(end)) and type(end).__new__ is object.__new__:
        state = object.__getstate__(end)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        leaves, structure = flatten({**(attributes or {}), **(slots or {})})
        return leaves, (type(end), structure)
    return [end], "entry"


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """The tree of these leaves, with new objects of the same classes."""
    remaining, ends = iter(leaves), []
    for part in structure.parts:
        if isinstance(part, tuple) and isinstance(part[1], Structure):
            kind, inner = part
            made = object.__new__(kind)
            for name, value in unflatten(remaining, inner).items():
                object.__setattr__(made, name, value)
            ends.append(made)
        else:
            ends.append(None if part is None else next(remaining))
    return tree_unflatten(ends, structure.spec)


def stacked(examples: Sequence[Flat]) -> Flat:
    """Batches of one example each: the leaves, with tensors (b, ...), and the structure that they have in common.

    Raises:
        DataError: when examples differ in structure or shape.
    """
    structure = examples[0][1]
    for _, other in examples:
        require_structure(other, structure)
    return [_stacked(column) for column in zip(*(leaves for leaves, _ in examples), strict=True)], structure


def _columns(examples: Sequence[list[Any]]) -> list[Tensor] | None:
    """The views of all examples as columns (views, ...), where each view is a tuple of tensors and numbers.

    Returns:
        None where a view is something else or empty, or where views differ in length, types or shapes.
    """
    views = list(chain.from_iterable(examples))
    kinds = {(type(view), *map(_kind, view)) if type(view) in (tuple, list) else (None,) for view in views}
    if len(kinds) != 1 or None in kinds.pop():
        return None
    return [default_collate(list(column)) for column in zip(*views, strict=True)] or None


def _of_columns(place: PhysicalBatch, columns: Iterable[Tensor], first: list[Any]) -> ExampleBatch:
    """What `default_collate`, `flatten` and `stacked` make of examples.

    Args:
        columns: as of `_columns`.
        first: the views of the first example.
    """
    count = len(place.indices)
    leaves = [column.contiguous().unflatten(0, (count, len(first))) for column in columns]
    return ExampleBatch(place, leaves, flatten(default_collate(first))[1], torch.ones(count, dtype=torch.bool))


def _kind(value: Any) -> Any:
    if type(value) is Tensor:
        return value.dtype, value.shape
    return type(value) if type(value) in (bool, int, float) else None


def require_structure(found: Structure, expected: Structure) -> None:
    """Refuse examples of another structure or shape.

    Raises:
        DataError: with the fix.
    """
    if found != expected:
        raise DataError(
            f"Examples of the training set have batches of different structure or shape: {expected.parts} and "
            f"{found.parts}. Let collate_fn return the same keys, lengths, classes and types of numbers for every "
            "example, None for all of them or for none, and tensors of one shape: pad or crop to a fixed length, in "
            "the data set or in collate_fn. A shape that depends on the example would leave the step."
        )


def _stacked(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return list(column)
    return torch.stack([leaf.as_subclass(Tensor) for leaf in column])


def _synthetic(example: Flat) -> Flat:
    """An example of the same structure, of ones, which have a norm and a logarithm, and zeros, which are indices."""
    leaves, structure = example
    ones = [torch.full_like(leaf, leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return ones, structure
