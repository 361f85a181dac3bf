"""The exact noise level of the output of a chain of linear transforms.

Each privatized gradient is a signal plus independent noise N(0, s_t^2) in every entry, with s_t = sigma S / B public. A
linear chain turns it, at step t, into the noise sum_k h_{t,k} s_k z_k with independent standard normal z_k and public
weights h_{t,k}. So the noise of one entry, and of everything that the transforms remember of it, is a vector of
coordinates in the basis z_1, z_2, ...; its length is the standard deviation. The vectors are advanced by each
transform's own `step`. Only their lengths and the angles between them matter, so after each step the basis is rotated
into one that has no more dimensions than there are vectors (a QR decomposition): the cost of a step does not grow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear, Slots
from dp_lightning.postprocess.transform import Noise, State, Transform


class NoiseTracker:
    """Follows the noise of every parameter through the transforms of a chain.

    Args:
        transforms: in their order. After one that is not linear, the noise of the parameters that it selects is not
            known.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self._transforms = tuple(transforms)
        self._states: list[State] = [{} for _ in self._transforms]

    def step(self, shapes: Mapping[str, torch.Size], noise: float | None) -> list[Noise]:
        """Advance by one step of the chain.

        Args:
            shapes: of the parameters that have a gradient at this step.
            noise: standard deviation in each entry of their privatized gradients; None where it is not known, which
                then holds for every step: a filter remembers the noise of the others.

        Returns:
            The noise of the input of each transform, and of the output of the last.
        """
        levels: list[dict[str, float | None]] = [{} for _ in range(len(self._transforms) + 1)]
        alike: dict[tuple[Any, ...], tuple[list[float | None], list[Slots]]] = {}
        for name, shape in shapes.items():
            chosen = tuple(transform.selects(name, shape) for transform in self._transforms)
            slots = [state.get(name, {}) for state in self._states]
            # Parameters with the same shape and history have the same noise.
            key = (shape, chosen, *(id(own) if own else None for own in slots))
            if key not in alike:
                alike[key] = self._follow(shape, chosen, slots, noise)
            passed, new_slots = alike[key]
            for place, level in enumerate(passed):
                levels[place][name] = level
            for state, own in zip(self._states, new_slots, strict=True):
                if own:
                    state[name] = own
        return list(levels)

    def _follow(
        self, shape: torch.Size, chosen: Sequence[bool], slots: Sequence[Slots], noise: float | None
    ) -> tuple[list[float | None], list[Slots]]:
        """The levels before each transform and after the last, and the new slots."""
        if noise is None:
            return [None] * (len(self._transforms) + 1), list(slots)
        known = next((value.numel() for own in slots for value in own.values() if value.ndim), 0)
        # The coordinates of one entry's noise; the last one is this step's own.
        entry: Tensor | None = torch.tensor([*[0.0] * known, noise], dtype=torch.float64)
        levels: list[float | None] = [noise]
        new_slots: list[Slots] = []
        for transform, here, own in zip(self._transforms, chosen, slots, strict=True):
            updated = own
            if here and isinstance(transform, EntrywiseLinear) and entry is not None:
                widened = {key: _with_zero(value) if value.ndim else value for key, value in own.items()}
                entry, updated = transform.advance(entry, widened, noise=levels[-1], shape=shape)
            elif here:
                entry = None
            levels.append(None if entry is None else torch.linalg.vector_norm(entry).item())
            new_slots.append(updated)
        return levels, _turned(new_slots)

    def state_dict(self) -> list[State]:
        """Coordinates by transform, parameter and slot."""
        return [dict(state) for state in self._states]

    def load_state_dict(self, states: Sequence[State]) -> None:
        """Continue from `state_dict` of a tracker of the same transforms."""
        self._states = [dict(state) for state in states]


def _with_zero(coordinates: Tensor) -> Tensor:
    return torch.cat([coordinates, coordinates.new_zeros(1)])


def _turned(slots: list[Slots]) -> list[Slots]:
    """The same vectors in a basis of the space that they span; their lengths and angles are unchanged."""
    places = [(i, key) for i, own in enumerate(slots) for key, value in own.items() if value.ndim]
    if not places:
        return slots
    vectors = torch.stack([slots[i][key] for i, key in places], dim=1)
    coordinates = torch.linalg.qr(vectors, mode="r").R
    turned = [dict(own) for own in slots]
    for column, (i, key) in enumerate(places):
        turned[i][key] = coordinates[:, column].clone()
    return turned
