"""Replaces or freezes the BatchNorm layers of a network, which private training otherwise refuses.

BatchNorm normalises by statistics of the batch, so examples affect each other's gradients. Either the layer becomes a
GroupNorm (Wu and He 2018), or it stays in evaluation mode with the statistics of its pretrained weights.
"""

from typing import Any, TypeAlias, cast, get_args

from torch import nn

from dp_lightning.errors import ModelError

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def batch_norm_to_group_norm(model: nn.Module, *, num_groups: int = 32) -> list[str]:
    """Replace every BatchNorm layer by a GroupNorm with its scale and shift, in place.

    The number of groups of a layer is the largest divisor of its channels up to ``num_groups``. A GroupNorm has no
    running statistics, so they are dropped and the network computes a different function: weights trained with
    BatchNorm are only a starting point.

    Returns:
        The names of the layers.

    Raises:
        ModelError: for a kind of BatchNorm that cannot be replaced.
    """
    names = []
    for name, module in list(model.named_modules()):
        for key, child in list(module.named_children()):
            if not isinstance(child, BatchNorm):
                continue
            path = f"{name}.{key}" if name else key
            groups = max(k for k in range(1, min(num_groups, child.num_features) + 1) if child.num_features % k == 0)
            setattr(module, key, _group_norm_like(child, groups, path))
            names.append(path)
    return names


def freeze_batch_norm(model: nn.Module) -> list[str]:
    """Put every BatchNorm layer in evaluation mode and freeze its scale and shift.

    It then applies the same fixed scale and shift to every example. ``model.train()`` puts it back into training mode.

    Returns:
        The names of the layers.

    Raises:
        ModelError: for a layer without running statistics, which would use those of the batch.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            if module.running_mean is None:
                raise ModelError(f"'{name}' ({type(module).__name__}) has no running statistics and cannot be frozen.")
            module.eval().requires_grad_(False)
            names.append(name)
    return names


def _group_norm_like(norm: BatchNorm, num_groups: int, path: str) -> nn.GroupNorm:
    replacement: Any
    if type(norm) in get_args(BatchNorm):
        replacement = nn.GroupNorm(num_groups, norm.num_features, eps=norm.eps, affine=norm.affine)
    elif f"{type(norm).__module__}.{type(norm).__qualname__}" == "timm.layers.norm_act.BatchNormAct2d":
        from timm.layers.norm_act import GroupNormAct  # timm is slow to import

        replacement = GroupNormAct(norm.num_features, num_groups, eps=norm.eps, affine=norm.affine)
        replacement.act, replacement.drop = norm.act, norm.drop
    else:
        raise ModelError(f"'{path}' ({type(norm).__name__}) is a kind of BatchNorm without a matching GroupNorm.")
    if norm.affine:
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return cast(nn.GroupNorm, replacement)


def fixed_statistics(module: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in evaluation mode, whose statistics have to be public."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) and not part.training and part.running_mean is not None
    ]
