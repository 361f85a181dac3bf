"""What a transform of the privatized gradient is.

A transform is a function (gradients, state) -> (gradients, state) of the privatized gradients and of numbers
that are public. It never sees an example, a loss or an unnoised sum, so by the post-processing property of
differential privacy (Dwork and Roth 2014, Proposition 2.1) it costs no privacy.

The state is a value, not something hidden in the transform: for each parameter's name a dictionary of
tensors. It starts empty, and a parameter that it does not hold yet starts its own history.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError

AppliesTo = Literal["matrices", "vectors", "all"]
Gradients = dict[str, Tensor]
State = dict[str, dict[str, Tensor]]


class Transform(ABC):
    """Base of every transform. A subclass implements `update`.

    Args:
        applies_to: "matrices" are the parameters with two or more dimensions, viewed as (out, everything
            else); "vectors" are the others; "all" is both. Other parameters pass through untouched.

    Raises:
        ConfigurationError: `applies_to` is none of the three.
    """

    #: Whether the transform adds momentum. `Chain` refuses two of them on one kind of parameter.
    has_momentum: bool = False

    def __init__(self, *, applies_to: AppliesTo = "matrices") -> None:
        if applies_to not in ("matrices", "vectors", "all"):
            raise ConfigurationError(f"applies_to must be 'matrices', 'vectors' or 'all', got {applies_to!r}")
        self.applies_to = applies_to

    @abstractmethod
    def update(self, gradients: Gradients, state: State) -> tuple[Gradients, State]:
        """Transform the selected gradients.

        Args:
            gradients: the selected gradients, by parameter name. They must not be changed in place.
            state: what this transform returned at the step before, for some or all of these names.

        Returns:
            The new gradients, in the same shapes and dtypes, and the new state of these parameters. Neither
            may share memory with `gradients` or with each other: the caller may overwrite a gradient in
            place.
        """

    def cost(self, shape: torch.Size) -> float:
        """Floating-point operations for one parameter of this shape, where they may be dealt out to ranks.

        That needs a parameter's output to depend on its gradient alone, without state. 0, the default, has every
        rank compute every parameter.
        """
        return 0.0

    def apply(self, gradients: Gradients, state: State) -> tuple[Gradients, State]:
        """`update` on the parameters that `applies_to` selects; the others are passed on as they are."""
        selected = {name: gradient for name, gradient in gradients.items() if self._selects(gradient)}
        present = {name: _on_device_of(selected[name], state[name]) for name in selected if name in state}
        updated, new_state = self.update(selected, present)
        return {**gradients, **updated}, {**state, **new_state}

    def kinds(self) -> set[str]:
        """The kinds of parameter that this transform selects: "matrices", "vectors" or both."""
        return {"matrices", "vectors"} if self.applies_to == "all" else {self.applies_to}

    def _selects(self, gradient: Tensor) -> bool:
        return ("matrices" if gradient.ndim >= 2 else "vectors") in self.kinds()


def _on_device_of(gradient: Tensor, slots: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move a parameter's state to its gradient, as after a load from disk. Scalars stay on the CPU."""
    return {key: value if value.ndim == 0 else value.to(gradient.device) for key, value in slots.items()}
