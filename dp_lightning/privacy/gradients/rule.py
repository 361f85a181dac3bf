"""The interface of a layer's rule: from what the layer saw to its parameters' per-example gradients."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from dp_lightning.privacy.gradients.contribution import Contribution


class Rule(Protocol):
    """One kind of layer. ``names`` maps the layer's own parameter names to names in the whole model."""

    def per_example(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Gradients (b, *parameter.shape) of the parameters in ``wanted``.

        Args:
            module: the layer.
            inputs: what the layer saw, (b, ...).
            grad_output: the loss's gradient with respect to what the layer returned, (b, ...).
            wanted: the layer's own names of its trained parameters.
        """
        ...

    def factored(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]
    ) -> Contribution | None:
        """The same gradients left as factors where that is cheaper than forming them, else None."""
        ...
