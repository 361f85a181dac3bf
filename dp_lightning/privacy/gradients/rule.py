"""The interface of a layer's rule: from what the layer saw to its parameters' per-example gradients."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from dp_lightning.privacy.gradients.contribution import Contribution


class Rule(Protocol):
    """One kind of layer."""

    def contribution(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]
    ) -> Contribution:
        """The per-example gradients of the parameters in ``names``.

        Args:
            module: the layer.
            inputs: what the layer saw, (b, ...).
            grad_output: the loss's gradient with respect to what the layer returned, (b, ...).
            names: the layer's own names of its trained parameters to their names in the whole model.
        """
        ...
