"""Transforms that add gradients and scale them by public numbers, so that their effect on the noise is known.

The code of such a transform never sees a tensor. It gets an `Entry`, which stands for each entry of a gradient and can
be added to others and scaled. Anything else, such as mixing entries, adding a constant, or taking a sign, would change
the noise in a way that is not known, and is refused.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform

Slots = dict[str, Tensor]
# Prefix of a public number, which the state keeps beside the tensors as a float64 scalar.
_NUMBER = "number/"


class Entry:
    """Each entry of a gradient, or of what a transform remembers of gradients.

    ``a + b``, ``a - b``, ``2.0 * a``, ``a * 2.0``, ``a / 2.0`` and ``a.zeros()`` are the only operations.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def __bool__(self) -> bool:
        raise TypeError("an entry is neither true nor false")

    def zeros(self) -> "Entry":
        """An entry of zero."""
        return Entry(torch.zeros_like(self._value))

    def __add__(self, other: "Entry") -> "Entry":
        return Entry(self._value + _value_of(other))

    def __sub__(self, other: "Entry") -> "Entry":
        return Entry(self._value - _value_of(other))

    def __mul__(self, factor: float) -> "Entry":
        return Entry(_number(factor) * self._value)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Entry":
        return Entry(self._value / _number(divisor))


def _value_of(other: Any) -> Tensor:
    if not isinstance(other, Entry):
        raise TypeError(f"{type(other).__name__} in the place of an entry")
    return other._value


def _number(factor: Any) -> float:
    if not isinstance(factor, int | float):
        raise TypeError(f"an entry is scaled by {type(factor).__name__} rather than int or float")
    return factor


@dataclass(frozen=True)
class Memory:
    """What a transform remembers of earlier steps, for one parameter. It is empty at the first step.

    Attributes:
        entries: sums of the gradients so far.
        numbers: public numbers, such as a gain that depends on the number of steps.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class EntrywiseLinear(Transform):
    """A transform whose output is, in each entry, a sum of the present and past gradients with public weights.

    A subclass implements `step`. `NoiseTracker` runs the same `step` on the noise's own coordinates, so the
    noise that a chain reports is that of the code that computed its output.

    Raises:
        ConfigurationError: `step` does something to an entry that is not linear or not entrywise.
    """

    @abstractmethod
    def step(self, value: Entry, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Entry, Memory]:
        """One step for one parameter.

        The weights may depend on the settings, on ``memory.numbers``, ``noise`` and ``shape``, and on nothing else.

        Args:
            value: the gradient.
            memory: what the previous step returned.
            noise: standard deviation of the noise in each entry of the gradient; None where it is not known.
            shape: of the parameter.

        Returns:
            The output, and the new memory.
        """

    @final
    def advance(self, value: Tensor, slots: Slots, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Slots]:
        """`step` on a tensor: a gradient, or the coordinates of the noise of one entry.

        Args:
            value: its shape need not be that of the parameter.
            slots: what the previous step returned; empty at the first.
            noise, shape: as in `step`.

        Returns:
            The output and the new slots, none of which shares memory with another or with `value`.
        """
        memory = Memory(
            {name: Entry(slot) for name, slot in slots.items() if not name.startswith(_NUMBER)},
            {name.removeprefix(_NUMBER): slot.item() for name, slot in slots.items() if name.startswith(_NUMBER)},
        )
        try:
            output, memory = self.step(Entry(value), memory, noise=noise, shape=shape)
            found = {name: _value_of(entry) for name, entry in memory.entries.items()}
            numbers = {f"{_NUMBER}{name}": _number(number) for name, number in memory.numbers.items()}
            result = _value_of(output)
        except (TypeError, AttributeError) as error:  # operations that an entry does not have
            raise ConfigurationError(
                f"{type(self).__name__} derives from EntrywiseLinear, and its step fails on an entry ({error}). It may "
                "only add entries and scale them by public numbers, so that the noise after it is known. Derive from "
                "Transform if the noise after it need not be known."
            ) from error
        taken = {id(value)}
        for name, slot in found.items():
            found[name] = slot.clone() if id(slot) in taken else slot
            taken.add(id(found[name]))
        if id(result) in taken:
            result = result.clone()
        return result, found | {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    @final
    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        output: Gradients = {}
        new_state: State = {}
        for name, gradient in gradients.items():
            slots = state.get(name, {})
            output[name], slots = self.advance(gradient, slots, noise=noise.get(name), shape=gradient.shape)
            if slots:
                new_state[name] = slots
        return output, new_state
