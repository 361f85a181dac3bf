"""A sequence of transforms together with its state: what a training step calls and a checkpoint keeps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.sharing import apply_on_ranks
from dp_lightning.postprocess.transform import Gradients, State, Transform
from dp_lightning.ranks import Ranks


class Chain:
    """Apply transforms in order to the privatized gradients of one step.

    Args:
        transforms: applied from the first to the last. An empty chain returns its input.
        ranks: the processes that hold the same gradients and call the chain together.

    Raises:
        ConfigurationError: two transforms with momentum select the same kind of parameter.
    """

    def __init__(self, transforms: Sequence[Transform] = (), *, ranks: Ranks | None = None) -> None:
        self.transforms = tuple(transforms)
        self.ranks = ranks or Ranks()
        for kind in ("matrices", "vectors"):
            if sum(transform.has_momentum and kind in transform.kinds() for transform in self.transforms) > 1:
                raise ConfigurationError(
                    f"transforms: momentum is applied twice to the {kind}; keep one Momentum for them, or "
                    "let applies_to of the two name different parameters"
                )
        self._states: list[State] = [{} for _ in self.transforms]

    @property
    def has_momentum(self) -> bool:
        """Whether any transform of the chain adds momentum."""
        return any(transform.has_momentum for transform in self.transforms)

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, Tensor]) -> Gradients:
        """Transform the privatized gradients of one step and advance the state by it.

        Args:
            gradients: parameter name to gradient, in the parameter's shape. They are not changed.

        Returns:
            The transformed gradients, with the same names, shapes, dtypes and devices. A gradient that no
            transform selects is the input tensor itself.
        """
        result = dict(gradients)
        for i, transform in enumerate(self.transforms):
            result, self._states[i] = apply_on_ranks(transform, result, self._states[i], self.ranks)
        return result

    def state_dict(self) -> dict[str, State]:
        """The state of each transform under its position and class: nested dictionaries of tensors."""
        return dict(zip(self._keys(), self._states, strict=True))

    def load_state_dict(self, state_dict: Mapping[str, State]) -> None:
        """Continue from `state_dict`.

        Raises:
            ConfigurationError: it was saved by a chain of other transforms.
        """
        if list(state_dict) != self._keys():
            raise ConfigurationError(
                f"transforms: the saved state belongs to {list(state_dict)}, the configuration has "
                f"{self._keys()}; resume with the transforms that the run was started with"
            )
        self._states = [dict(state) for state in state_dict.values()]

    def _keys(self) -> list[str]:
        return [f"{i}.{type(transform).__name__}" for i, transform in enumerate(self.transforms)]
