"""Which parameters of a module a private run trains; that is fixed when it begins."""

from collections.abc import Collection, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from dp_lightning.errors import ModelError


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that require a gradient, by name.

    Raises:
        ModelError: where no parameter requires a gradient, one is complex, or a lazy layer has no parameters yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"'{name}' belongs to a lazy layer and has no shape yet. Run a batch of zeros through the model before "
                "training, or give the layer its size, as nn.Linear(in_features, out_features) does."
            )
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if names := [name for name, parameter in found.items() if parameter.is_complex()]:
        raise ModelError(
            f"{', '.join(names[:5])} is complex, and norms are taken of real parameters. Hold real and imaginary "
            "parts, and combine them in forward: torch.view_as_complex(self.weight), of shape (..., 2)."
        )
    if not found:
        raise ModelError("The model has no parameter that requires a gradient, so there is nothing to train.")
    return found


def require_same_trained(parameters: Mapping[str, nn.Parameter], trained: Collection[str]) -> None:
    """Refuse a parameter that was frozen or unfrozen since the run began.

    Args:
        parameters: all parameters that the module had at the start, by name.
        trained: the names of the trained parameters.

    Raises:
        ModelError: naming the parameters that have changed.
    """
    changed = [name for name, parameter in parameters.items() if parameter.requires_grad is not (name in trained)]
    if changed:
        raise ModelError(
            f"{', '.join(changed[:5])} {'were' if changed[1:] else 'was'} "
            f"{'frozen' if changed[0] in trained else 'unfrozen'} during the private run. Which parameters are trained "
            "is fixed when it begins: freeze others before the fit. To train some only later, set "
            "privacy.frozen_until."
        )
