"""The exact noise level of the output of a chain of linear transforms.

Each privatized gradient is a signal plus noise s_t y_t in every entry, with s_t = sigma S / B public. y_t is standard
normal z_t, independent of other steps, or the sum of g_k z_{t-k} over k, where g(x) = 1 / c(x) for public coefficients
c. A linear chain turns it, at step t, into the noise sum_k h_{t,k} z_k with public weights h_{t,k}. So the noise of one
entry, and of everything that the transforms remember of it, is a vector of coordinates in the basis z_1, ..., z_t; its
length is the standard deviation. The vectors are advanced by each transform's own `step`, and the oldest coordinates
are left out as soon as they hold next to nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear, Slots
from dp_lightning.postprocess.transform import Noise, State, Transform

# The share of a vector's squared length below which coordinates are left out: below rounding in the level itself.
_NOTHING = 1e-16


class NoiseTracker:
    """Follows the noise of every parameter through the transforms of a chain.

    Args:
        transforms: in their order. After one that is not linear, the noise of the parameters that it selects is not
            known.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self._transforms = tuple(transforms)
        self._states: list[State] = [{} for _ in self._transforms]
        self.begin((1.0,))

    def begin(self, coefficients: Sequence[float]) -> None:
        """Begin a block of noise that is independent of all noise so far, as `Chain.begin_noise` does."""
        self._coefficients = torch.tensor(coefficients, dtype=torch.float64)
        self._unit = torch.empty(0, dtype=torch.float64)  # coordinates of y, that of the latest z last

    def step(self, shapes: Mapping[str, torch.Size], noise: float | None) -> list[Noise]:
        """Advance by one step of the chain.

        Args:
            shapes: of the parameters that have a gradient at this step.
            noise: standard deviation in each entry of their privatized gradients; None where it is not known, which
                then holds for every step: a filter remembers the noise of the others.

        Returns:
            The noise of the input of each transform, and of the output of the last.
        """
        self._advance()
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

    def _advance(self) -> None:
        """Append the next number of the power series g, until those to come hold nothing."""
        reach = len(self._coefficients) - 1
        latest = self._unit[:reach]
        if len(self._unit) and latest.square().sum() <= _NOTHING * self._unit.square().sum():
            return
        follows = float(len(self._unit) == 0) - self._coefficients[1 : len(latest) + 1] @ latest
        self._unit = torch.cat([follows[None] / self._coefficients[0], self._unit])

    def _follow(
        self, shape: torch.Size, chosen: Sequence[bool], slots: Sequence[Slots], noise: float | None
    ) -> tuple[list[float | None], list[Slots]]:
        """The levels before each transform and after the last, and the new slots of each."""
        if noise is None:
            return [None] * (len(self._transforms) + 1), list(slots)
        known = max((value.numel() for own in slots for value in own.values() if value.ndim), default=0)
        size = max(known + 1, len(self._unit))
        entry: Tensor | None = pad(noise * self._unit, (size - len(self._unit), 0))
        levels, new_slots = [_length(entry)], list[Slots]()
        for transform, here, own in zip(self._transforms, chosen, slots, strict=True):
            updated = {key: pad(value, (size - known - 1, 1)) if value.ndim else value for key, value in own.items()}
            if here and isinstance(transform, EntrywiseLinear) and entry is not None:
                entry, updated = transform.advance(entry, updated, noise=levels[-1], shape=shape)
            elif here:
                entry = None
            levels.append(_length(entry))
            new_slots.append(updated)
        return levels, _without_nothing(new_slots)

    def state_dict(self) -> list[State]:
        """Coordinates by transform, parameter and slot."""
        return [dict(state) for state in self._states]

    def load_state_dict(self, states: Sequence[State]) -> None:
        """Continue from `state_dict` of a tracker of the same transforms."""
        self._states = [dict(state) for state in states]


def _length(entry: Tensor | None) -> float | None:
    return None if entry is None else torch.linalg.vector_norm(entry).item()


def _without_nothing(slots: list[Slots]) -> list[Slots]:
    """The same vectors without their first coordinates, where these hold next to nothing of any of them."""
    vectors = [value for own in slots for value in own.values() if value.ndim]
    if not vectors:
        return slots
    held = torch.stack(vectors).square().cumsum(1)
    empty = int((held <= _NOTHING * held[:, -1:]).all(0).sum())
    return [{key: value[empty:] if value.ndim else value for key, value in own.items()} for own in slots]
