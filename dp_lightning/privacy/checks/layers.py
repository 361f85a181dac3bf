"""Refuses layers that are known to mix examples, by type, before the data is touched."""

from torch import nn

from dp_lightning.errors import ModelError


def refuse_mixing_modules(model: nn.Module) -> None:
    """Refuse layers that are known to mix examples, and compiled modules.

    Raises:
        ModelError: with the module's name and the fix.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ModelError(
                f"Module '{name}' is compiled: compiled code does not show what its layers see, so no "
                "per-example gradient can be taken. Train the module without torch.compile."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            if module.track_running_stats:
                raise ModelError(
                    f"Module '{name}' ({type(module).__name__}) cannot be trained privately: its running statistics "
                    "are computed from raw examples. Set track_running_stats=False."
                )
            continue
        refuse_batch_statistics(name, module)


def refuse_batch_statistics(name: str, module: nn.Module) -> None:
    """Refuse a BatchNorm that normalises by the batch it sees.

    Raises:
        ModelError: with the module's name and the fix.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not _is_fixed(module):
        raise ModelError(
            f"Module '{name}' ({type(module).__name__}) cannot be trained privately: it computes statistics "
            "over the batch, so examples enter each other's gradients. Make it a GroupNorm (TimmModule: "
            "batch_norm: group_norm; any model: dp_lightning.models.batch_norm_to_group_norm), or keep it in "
            "evaluation mode with statistics of public data (batch_norm: frozen; freeze_batch_norm)."
        )


def fixed_statistics(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in evaluation mode, whose statistics have to be public."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_fixed(module)
    ]


def _is_fixed(norm: nn.modules.batchnorm._NormBase) -> bool:
    """Whether the layer is the same scale and shift for every example."""
    return not norm.training and norm.running_mean is not None
