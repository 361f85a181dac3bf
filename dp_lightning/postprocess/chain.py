"""A sequence of transforms together with its state: what a training step calls and a checkpoint keeps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear
from dp_lightning.postprocess.noise import NoiseTracker
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform


class Chain:
    """Apply transforms in order to the privatized gradients of one step.

    Args:
        transforms: applied from the first to the last. An empty chain returns its input.

    Attributes:
        noise: standard deviation of the noise in each entry of what the last call returned, by parameter name; None
            if a transform that is not linear has acted.
    """

    def __init__(self, transforms: Sequence[Transform] = ()) -> None:
        self.transforms = tuple(transforms)
        self.noise: Noise = {}
        self._states: list[State] = [{} for _ in self.transforms]
        self._tracker = NoiseTracker(self.transforms)

    def begin_noise(self, coefficients: Sequence[float]) -> None:
        """Begin a block of noise that is independent of all noise so far.

        Args:
            coefficients: c_0, ..., c_{b-1} of noise y with sum over j of c_j y_{t-j} = z_t for independent standard
                normal z_t; ``(1,)`` is independent noise.
        """
        self._tracker.begin(coefficients)

    def filtered(self, series: Sequence[float]) -> list[float]:
        """What the filters before the first transform that is not linear make of a series of numbers, one a step."""
        values = [torch.tensor(number, dtype=torch.float64) for number in series]
        for transform in self.transforms:
            if not isinstance(transform, EntrywiseLinear):
                break
            slots: dict[str, Tensor] = {}
            for step, value in enumerate(values if transform.has_memory else ()):
                values[step], slots = transform.advance(value, slots, noise=None, shape=torch.Size((2, 2)))
        return [value.item() for value in values]

    def check(self, shapes: Mapping[str, torch.Size], *, noise: float | None) -> None:
        """Refuse what cannot work for these parameters, before the first step.

        Raises:
            ConfigurationError: a pattern matches no parameter, momentum is applied twice to one, a transform needs
                the noise level and it is not known, or one that claims to be linear and entrywise is not.
        """
        levels = NoiseTracker(self.transforms).step(shapes, noise)
        with_momentum: dict[str, int] = {}
        for place, (transform, level) in enumerate(zip(self.transforms, levels, strict=False)):
            title = type(transform).__name__
            if unmatched := transform.unmatched(shapes):
                raise ConfigurationError(
                    f"{title}: no trained parameter's name matches {', '.join(unmatched)}. The names are such as "
                    f"{', '.join(list(shapes)[:4])}"
                )
            selected = [name for name, shape in shapes.items() if transform.selects(name, shape)]
            if not selected and (transform.include is not None or transform.exclude):
                raise ConfigurationError(
                    f"{title} acts on no parameter: include {transform.include} and exclude {list(transform.exclude)} "
                    f"leave none of those that it applies to ({transform.applies_to})"
                )
            for name in selected:
                if transform.has_momentum and with_momentum.setdefault(name, place) != place:
                    raise ConfigurationError(
                        f"transforms: momentum is applied twice to {name}; keep one Momentum for it, or make "
                        "applies_to, include and exclude of the two select different parameters"
                    )
                if transform.needs_noise and level[name] is None:
                    raise ConfigurationError(
                        f"{title} needs the noise of the privatized gradient, which is not known for {name} here. "
                        + (
                            "Train with PrivacyCallback"
                            if noise is None
                            else f"Put {title} before the transforms that are not linear, such as Orthogonalize"
                        )
                    )

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, Tensor], *, noise: float | None = None) -> Gradients:
        """Transform the privatized gradients of one step and advance the state by it.

        Args:
            gradients: parameter name to gradient, in the parameter's shape. They are not changed.
            noise: sigma S / B, how many times the noise in each of their entries is noise of unit scale; None where it
                is not known.

        Returns:
            The transformed gradients, with the same names, shapes, dtypes and devices. A gradient that no
            transform selects is the input tensor itself.
        """
        result = dict(gradients)
        levels = self._tracker.step({name: gradient.shape for name, gradient in gradients.items()}, noise)
        for i, transform in enumerate(self.transforms):
            result, self._states[i] = transform.apply(result, self._states[i], levels[i])
        self.noise = levels[-1]
        return result

    def state_dict(self) -> dict[str, Any]:
        """The state of each transform under its position and class, and that of the noise: nested dictionaries."""
        return {"transforms": dict(zip(self._keys(), self._states, strict=True)), "noise": self._tracker.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ConfigurationError: it was saved by a chain of other transforms.
        """
        saved = state_dict["transforms"]
        if list(saved) != self._keys():
            raise ConfigurationError(
                f"transforms: the saved state belongs to {list(saved)}, the configuration has "
                f"{self._keys()}; resume with the transforms that the run was started with"
            )
        self._states = [dict(state) for state in saved.values()]
        self._tracker.load_state_dict(state_dict["noise"])

    def _keys(self) -> list[str]:
        """The key of each state; it contains every setting if the state is valid only under these settings."""
        titles = [repr(t) if t.has_memory else type(t).__name__ for t in self.transforms]
        return [f"{i}.{title}" for i, title in enumerate(titles)]
