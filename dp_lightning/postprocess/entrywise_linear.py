"""Transforms that add gradients and scale them by public numbers, so that their effect on the noise is known.

`EntrywiseLinear.step` runs on gradients, and on the coordinates of the noise of one entry. It adds tensors and scales
them by public numbers. Anything else, such as mixing entries, adding a constant, or taking a sign, would change the
noise in a way that is not known: such a transform derives from `Transform`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform

Slots = dict[str, Tensor]
# Prefix of a public number, which the state keeps beside the tensors as a float64 scalar.
_NUMBER = "number/"


@dataclass(frozen=True)
class Memory:
    """What a transform remembers of earlier steps, for one parameter. It is empty at the first step.

    Attributes:
        entries: sums of the gradients so far.
        numbers: public numbers, such as a gain that depends on the number of steps.
    """

    entries: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class EntrywiseLinear(Transform):
    """A transform whose output is, in each entry, a sum of the present and past gradients with public weights.

    A subclass implements `step`. `NoiseTracker` runs the same `step` on the noise's own coordinates, so the
    noise that a chain reports is that of the code that computed its output.
    """

    @abstractmethod
    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        """One step for one parameter.

        The weights may depend on the settings, on ``memory.numbers``, ``noise`` and ``shape``, and on nothing else.

        Args:
            value: the gradient, or coordinates of its noise; it must not be changed in place.
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
            {name: slot for name, slot in slots.items() if not name.startswith(_NUMBER)},
            {name.removeprefix(_NUMBER): slot.item() for name, slot in slots.items() if name.startswith(_NUMBER)},
        )
        result, memory = self.step(value, memory, noise=noise, shape=shape)
        found = dict(memory.entries)
        numbers = {f"{_NUMBER}{name}": number for name, number in memory.numbers.items()}
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
