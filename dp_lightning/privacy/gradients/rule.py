"""The interface of a layer's rule: from what the layer saw to its parameters' per-example gradients."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from dp_lightning.privacy.gradients.contribution import Contribution


class Rule(Protocol):
    """One kind of layer."""

    def contribution(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str], augmult: int
    ) -> Contribution:
        """The per-example gradients of the parameters in ``names``, those of an example's views added up.

        Args:
            module: the layer.
            inputs: what the layer saw, (b * K, ...).
            grad_output: the loss's gradient with respect to what the layer returned, (b * K, ...).
            names: the layer's own names of its trained parameters to their names in the whole model.
            augmult: K, the views of each example, which follow each other.
        """
        ...
