"""Replaces or freezes the BatchNorm layers of a network, which private training otherwise refuses.

BatchNorm normalises by statistics of the batch, so examples affect each other's gradients. Either the layer becomes a
GroupNorm (Wu and He 2018), or it stays in evaluation mode with the statistics of its pretrained weights.
"""

import warnings
from typing import Any, TypeAlias, TypeVar, cast, get_args

from torch import nn

from dp_lightning.errors import ModelError

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
# Behind a linear layer or on one pixel a group has no other values than its channels. One value is normalised to zero,
# and two to -1 and 1, so that nothing before them would learn; Wu and He find 4 to 64 channels equally good.
_CHANNELS_OF_A_GROUP = 4
Network = TypeVar("Network", bound=nn.Module)


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers of a network by name; a layer of several names stands under each of them."""
    return {name: part for name, part in model.named_modules(remove_duplicate=False) if isinstance(part, BatchNorm)}


def batch_norm_to_group_norm(model: Network, *, num_groups: int = 32) -> Network:
    """Replace every BatchNorm layer of a network by a GroupNorm with its scale and shift, in place.

    The parameters stay the same objects, so an optimizer that has them keeps working. The number of groups of a layer
    is the largest divisor of its channels that is at most ``num_groups`` and leaves four channels to a group. A
    GroupNorm has no running statistics, so they are dropped and the network computes a different function: weights
    trained with BatchNorm are only a starting point.

    Returns:
        The network; where this is a single BatchNorm layer, the GroupNorm.

    Raises:
        ModelError: for a kind of BatchNorm that cannot be replaced.
    """
    layers = batch_norms(model)
    replacements = {norm: _group_norm_like(norm, num_groups, name) for name, norm in layers.items()}
    for name, norm in layers.items():
        if not name:
            return cast(Network, replacements[norm])
        model.set_submodule(name, replacements[norm])
    return model


def freeze_batch_norm(model: Network) -> Network:
    """Put every BatchNorm layer of a network in evaluation mode and freeze its scale and shift, in place.

    It then applies the same fixed scale and shift to every example. ``model.train()`` puts it back into training mode.

    Returns:
        The network.

    Raises:
        ModelError: for a layer without running statistics, which would use those of the batch.
    """
    for name, norm in batch_norms(model).items():
        if norm.running_mean is None:
            raise ModelError(f"'{name}' ({type(norm).__name__}) has no running statistics and cannot be frozen.")
        norm.eval().requires_grad_(False)
    return model


def change_batch_norm(model: nn.Module, way: str | None) -> str:
    """Replace (``group``) or freeze (``freeze``) the BatchNorm layers of a network; any other way leaves them.

    Returns:
        What became of them, in words; empty where nothing was changed.
    """
    names = list(batch_norms(model)) if way in ("group", "freeze") else []
    if not names:
        return ""
    if way == "group":
        scales = [parameter for norm in batch_norms(model).values() for parameter in norm.parameters()]
        if scales and not any(scale.requires_grad for scale in scales):
            warnings.warn(
                "privacy.batch_norm is group, which drops the statistics of BatchNorm layers, and no scale of these is "
                "trained: what the frozen network computes is lost. Set batch_norm: freeze.",
                stacklevel=2,
            )
        batch_norm_to_group_norm(model)
        became = "became GroupNorm, with the same scales and shifts"
    else:
        freeze_batch_norm(model)
        became = "stay in evaluation mode, with frozen scales and shifts"
    return f"{len(names)} BatchNorm layers ({names[0]} to {names[-1]}) {became}"


def _group_norm_like(norm: BatchNorm, num_groups: int, path: str) -> nn.GroupNorm:
    most = max(min(num_groups, norm.num_features // _CHANNELS_OF_A_GROUP), 1)
    groups = max(k for k in range(1, most + 1) if norm.num_features % k == 0)
    replacement: Any
    if type(norm) in get_args(BatchNorm):
        replacement = nn.GroupNorm(groups, norm.num_features, eps=norm.eps, affine=norm.affine)
    elif f"{type(norm).__module__}.{type(norm).__qualname__}" == "timm.layers.norm_act.BatchNormAct2d":
        from timm.layers.norm_act import GroupNormAct  # timm is slow to import

        replacement = GroupNormAct(norm.num_features, groups, eps=norm.eps, affine=norm.affine)
        replacement.act, replacement.drop = norm.act, norm.drop
    else:
        raise ModelError(f"'{path}' ({type(norm).__name__}) is a kind of BatchNorm without a matching GroupNorm.")
    if norm.affine:
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return cast(nn.GroupNorm, replacement)


def warn_without_statistics(model: nn.Module) -> None:
    """Warn where the statistics of every layer are those of a network without training, and normalise nothing."""
    layers: list[Any] = list(batch_norms(model).values())
    if layers and not any(norm.running_mean.any() or (norm.running_var != 1).any() for norm in layers):
        warnings.warn(
            "privacy.batch_norm is freeze, but the BatchNorm layers have the statistics of a network without training. "
            "Start from pretrained weights (pretrained: true or weights of TimmModule), or set batch_norm: group.",
            stacklevel=2,
        )


def fixed_statistics(module: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in evaluation mode, whose statistics have to be public."""
    return [name for name, norm in batch_norms(module).items() if not norm.training and norm.running_mean is not None]
