"""Parameters of a module with inner modules of its own: while it runs, it finds one copy per example in their place.

* Leading size 1 (``cls_token``, ``pos_embed``): the batch takes the place of the 1.
* Modules in ``SCALING``, which multiply an activation (b, channels, ...) by a scale per channel.
"""

from torch import Tensor, nn

from dp_lightning.errors import ModelError

SCALING = frozenset({"timm.models.convnext.ConvNeXtBlock", "torchvision.models.convnext.CNBlock"})


def takes_copies(module: nn.Module, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether copies per example can stand in for the module's own ``parameters``."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind in SCALING or all(_leading_one(p) for p in parameters.values())


def copies_of(parameter: Tensor, batch_size: int) -> Tensor:
    """One copy per example, which requires a gradient: (b, ...)."""
    whole = parameter.detach() if _leading_one(parameter) else parameter.detach().unsqueeze(0)
    return whole.expand(batch_size, *whole.shape[1:]).requires_grad_()


def stand_in(parameter: Tensor, copies: Tensor, augmult: int) -> "Tensor | VectorPerExample":
    """What the module gets to see: the copy of each example for all of its views."""
    copies = copies if augmult == 1 else copies.repeat_interleave(augmult, dim=0)
    return VectorPerExample(copies) if parameter.dim() == 1 else copies


def per_example(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of the copies as (b, *parameter.shape)."""
    return gradient.unsqueeze(1) if _leading_one(parameter) else gradient


class VectorPerExample:
    """A vector per example that is laid out as one vector is, to be multiplied with a batch.

    Args:
        copies: (b, channels).
    """

    def __init__(self, copies: Tensor) -> None:
        self._copies = copies

    def reshape(self, *shape: int) -> Tensor:
        """As ``Tensor.reshape``, with the batch in the place of the leading 1."""
        if shape[0] != 1:
            raise ModelError("A scale per channel can only be reshaped to a leading 1 in a private run.")
        return self._copies.reshape(len(self._copies), *shape[1:])

    view = reshape


def _leading_one(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.shape[0] == 1
