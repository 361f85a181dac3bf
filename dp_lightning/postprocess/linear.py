"""Transforms that treat every number of a gradient alike and linearly, so that what they do to the noise is known."""

from abc import abstractmethod

import torch
from torch import Tensor

from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform

Slots = dict[str, Tensor]


class LinearTransform(Transform):
    """A transform whose output is a sum of the present and past gradients, with public weights.

    A subclass implements `step`. `NoiseTracker` runs the same `step` on the noise's own coordinates, so the
    noise that a chain states is that of the code which made its output.
    """

    @abstractmethod
    def step(self, value: Tensor, slots: Slots, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Slots]:
        """One step for one parameter.

        Args:
            value: the gradient, or anything else whose entries take the same way. Its shape says nothing.
            slots: what the step before returned; empty at the first. A slot without dimensions is a public
                number, and the others are as linear in the gradients as the output is.
            noise: standard deviation of the noise in each entry of the gradient; None where it is not known.
            shape: of the parameter.

        Returns:
            The output and the new slots, none of which shares memory with another or with `value`.
        """

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        output: Gradients = {}
        new_state: State = {}
        for name, gradient in gradients.items():
            output[name], slots = self.step(gradient, state.get(name, {}), noise=noise.get(name), shape=gradient.shape)
            if slots:
                new_state[name] = slots
        return output, new_state
