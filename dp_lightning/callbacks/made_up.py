"""Examples like those of a training set, with other numbers, on which a module is tried before a run.

Whether a run starts then hardly depends on private data, and an example that is not finite cannot prevent it. The
numbers are such as a module takes: what looks like a label stays one.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# What the numbers of an outlier are multiplied by.
_OUTLYING = 1000.0
# Values of a tensor that may be marks, and how many numbers are looked at to find them.
_MARKS, _LOOKED_AT = 3, 2**20


class MadeUp:
    """Replaces numbers of examples by others of their kind.

    Floating-point tensors become numbers between 0 and 1, unless they are single whole numbers, as labels are. Images
    in bytes become bytes between the smallest and the largest seen. Everything else stays. Values that stand often in
    floating-point tensors may mark what is missing, or padding, as -1, 0 and NaN do, and are put in where asked for.

    Args:
        seen: examples of the data set, from which the kinds are told.
        num_classes: of the labels, where it is known; 0 otherwise.
        generator: for the numbers.
    """

    def __init__(self, seen: Sequence[Any], num_classes: int, generator: torch.Generator) -> None:
        self.seen, self._num_classes, self._generator = seen, num_classes, generator
        trees = [tree_flatten(example) for example in seen]
        self._spec = trees[0][1]
        self._alike = all(spec == self._spec for _, spec in trees)
        self._columns = list(zip(*(leaves for leaves, _ in trees), strict=True)) if self._alike else []
        self._marks = [self._often(column) for column in self._columns]

    @property
    def has_broken_marks(self) -> bool:
        """Whether values that are not finite stand in the examples."""
        return any(not math.isfinite(mark) for marks in self._marks for mark in marks)

    def like(self, example: Any, *, outlying: bool = False, marks: Literal["none", "finite", "all"] = "none") -> Any:
        """The example with other numbers.

        Args:
            example: one of the data set.
            outlying: numbers are large, where they are not parts of 1.
            marks: which of the values that stand often take the place of some of its numbers, but never of all in a
                tensor of several.
        """
        leaves, spec = tree_flatten(example)
        alike = spec == self._spec and self._alike
        columns = self._columns if alike else [(leaf,) for leaf in leaves]
        changed = [self._replaced(leaf, column, outlying) for leaf, column in zip(leaves, columns, strict=True)]
        if alike and marks != "none":
            usable = [[mark for mark in own if marks == "all" or math.isfinite(mark)] for own in self._marks]
            changed = [
                new if new is old else self._marked(new, own)
                for new, old, own in zip(changed, leaves, usable, strict=True)
            ]
        return tree_unflatten(changed, spec)

    def with_other_integers(self) -> list[Any]:
        """The examples that were seen, the first half of them with the integers of others.

        Integers of one example go together. Where there is one alone, and all of them could be labels, it is drawn from
        all classes. A quarter of the examples has equal ones, so that equal ones stand side by side.
        """
        places = [place for place, column in enumerate(self._columns) if all(map(_is_integer, column))]
        if not places or not self._one_shape():
            return list(self.seen)
        columns = [self._columns[place] for place in places]
        half, quarter = len(self.seen) // 2, len(self.seen) // 4
        lenders = torch.randperm(len(self.seen), generator=self._generator)[:half].tolist()
        numbers = [[column[index] for column in columns] for index in lenders]
        labels = columns[0]
        if len(columns) == 1 and all(0 <= int(label) < self._num_classes for label in labels):
            drawn = torch.randint(self._num_classes, (half,), generator=self._generator)
            numbers = [[number if isinstance(labels[0], Tensor) else int(number)] for number in drawn]
        numbers[:quarter] = numbers[:1] * quarter
        changed = []
        for example, own in zip(self.seen, numbers, strict=False):
            leaves, spec = tree_flatten(example)
            for place, number in zip(places, own, strict=True):
                leaves[place] = number
            changed.append(tree_unflatten(leaves, spec))
        return [*changed, *self.seen[len(changed) :]]

    def _one_shape(self) -> bool:
        """Whether no integer can be the length of something."""
        return all(len({getattr(leaf, "shape", None) for leaf in column}) == 1 for column in self._columns)

    def _often(self, column: Sequence[Any]) -> list[float]:
        """Values that stand more than once in floating-point tensors, the most frequent ones, and those not finite."""
        if not all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in column):
            return []
        numbers = torch.cat([leaf.flatten() for leaf in column])
        if len(numbers) > _LOOKED_AT:
            numbers = numbers[torch.randperm(len(numbers), generator=self._generator)[:_LOOKED_AT]]
        finite = numbers.isfinite()
        values, counts = numbers[finite].unique(return_counts=True)
        often = values[counts > 1][counts[counts > 1].argsort(descending=True)[:_MARKS]].tolist()
        broken = numbers[~finite]
        return often + [math.nan] * bool(broken.isnan().any()) + broken[~broken.isnan()].unique().tolist()

    def _marked(self, drawn: Tensor, marks: Sequence[float]) -> Tensor:
        if not marks:
            return drawn
        mark = marks[int(torch.randint(len(marks), (), generator=self._generator))]
        shape = list(drawn.shape)
        # Single numbers, or all along the first or the last dimension, as padding is.
        along = (None, 0, -1)[int(torch.randint(3, (), generator=self._generator))]
        if len(shape) > 1 and along is not None:
            shape[along] = 1
        chosen = torch.rand(shape, generator=self._generator) < torch.rand((), generator=self._generator)
        if chosen.numel() > 1:
            chosen.view(-1)[int(torch.randint(chosen.numel(), (), generator=self._generator))] = False
        return torch.where(chosen, mark, drawn)

    def _replaced(self, leaf: Any, column: Sequence[Any], outlying: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():
            whole = all(bool((one.isfinite() & (one == one.round())).all()) for one in column)
            if whole and leaf.dim() == 0:
                return leaf
            drawn = torch.rand(leaf.shape, generator=self._generator, dtype=leaf.dtype)
            parts = whole or all(bool(((one >= 0) & (one <= 1)).all()) for one in column)
            return drawn * _OUTLYING if outlying and not parts else drawn
        if leaf.dtype == torch.uint8 and leaf.dim() >= 3:
            low, high = min(int(one.min()) for one in column), max(int(one.max()) for one in column)
            return torch.randint(low, high + 1, leaf.shape, generator=self._generator, dtype=leaf.dtype)
        return leaf


def _is_integer(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() == 0 and leaf.dtype == torch.int64
    return isinstance(leaf, int | np.integer) and not isinstance(leaf, bool)
