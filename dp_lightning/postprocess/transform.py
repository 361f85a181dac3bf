"""The interface of a transform of the privatized gradient.

A transform is a function (gradients, state) -> (gradients, state) of the privatized gradients and of numbers
that are public. It never sees an example, a loss or an unnoised sum, so by the post-processing property of
differential privacy (Dwork and Roth 2014, Proposition 2.1) it costs no privacy.

The state is a value, not something hidden in the transform: for each parameter's name a dictionary of
tensors. It starts empty, and a parameter that it does not hold yet starts its own history.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypedDict

from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import is_matrix

AppliesTo = Literal["matrices", "vectors", "all"]
Gradients = dict[str, Tensor]
"""Privatized gradients by parameter name, each in the shape of its parameter."""
State = dict[str, dict[str, Tensor]]
"""What a transform remembers from step to step: for each parameter's name a dictionary of tensors."""
Noise = Mapping[str, float | None]
"""The standard deviation of the noise in each entry of a gradient, by parameter name; None where it is not known."""


class Where(TypedDict, total=False):
    """Which parameters a transform acts on, by patterns such as ``model.fc.*``."""

    include: Sequence[str] | None
    """Patterns of names: only parameters that match one are selected; None selects all."""
    exclude: Sequence[str] | None
    """Patterns of names: no parameter that matches one is selected."""


class Transform(ABC):
    """Base of every transform. A subclass implements `update`.

    Args:
        applies_to: "matrices" are the parameters that have two sides longer than one when they are viewed as
            (out, everything else); "vectors" are the others, such as a gain of shape (out, 1, 1, 1); "all" is both.
            Other parameters pass through untouched.
        include: patterns of parameter names, with the wildcards * and ?; None is every name.
        exclude: patterns of names that are left out.

    Raises:
        ConfigurationError: a setting of this class or of a subclass is outside its range.
    """

    #: Whether the transform adds momentum. `Chain` refuses two of them on one parameter.
    has_momentum: bool = False
    #: Whether the output depends on earlier steps.
    has_memory: bool = False
    #: Whether the transform has to know the noise of its input.
    needs_noise: bool = False

    def __init__(
        self,
        *,
        applies_to: AppliesTo = "matrices",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> None:
        if applies_to not in ("matrices", "vectors", "all"):
            raise ConfigurationError(f"applies_to must be 'matrices', 'vectors' or 'all', got {applies_to!r}")
        for name, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise ConfigurationError(f"{name} must be a list of patterns: ['{patterns}']")
        self.applies_to = applies_to
        self.include = None if include is None else tuple(include)
        self.exclude = tuple(exclude or ())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        """Transform the selected gradients.

        Args:
            gradients: the selected gradients, by parameter name. They must not be changed in place.
            state: what this transform returned at the previous step, for some or all of these names.
            noise: the noise of these gradients.

        Returns:
            The new gradients, in the same shapes and dtypes, and the new state of these parameters. Neither
            may share memory with `gradients` or with each other: the caller may overwrite a gradient in
            place.
        """

    def apply(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        """`update` on the parameters that are selected; the others are passed on unchanged."""
        selected = {name: gradient for name, gradient in gradients.items() if self.selects(name, gradient.shape)}
        if self.needs_noise and (unknown := [name for name in selected if noise.get(name) is None]):
            raise ConfigurationError(
                f"{type(self).__name__} needs the noise of the privatized gradient, which is not known for {unknown[0]}"
                ". Train with PrivacyCallback, and put it before the transforms that are not linear"
            )
        present = {name: _on_device_of(selected[name], state[name]) for name in selected if name in state}
        updated, new_state = self.update(selected, present, noise)
        return {**gradients, **updated}, {**state, **new_state}

    def selects(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the transform acts on the parameter of this name and shape."""
        included = self.include is None or any(fnmatchcase(name, pattern) for pattern in self.include)
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return included and not excluded and self.applies_to in ("all", "matrices" if is_matrix(shape) else "vectors")

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that no parameter's name matches."""
        names = list(names)
        patterns = (*(self.include or ()), *self.exclude)
        return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def _on_device_of(gradient: Tensor, slots: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move a parameter's state to its gradient, as after a load from disk. Scalars stay on the CPU."""
    return {key: value if value.ndim == 0 else value.to(gradient.device) for key, value in slots.items()}
