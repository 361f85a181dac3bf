"""Cuts a model into units: the modules at which per-example gradients are taken, and how at each.

* ``rule``: a layer that a rule of ours knows. Types are matched exactly, since a subclass may compute something else.
* ``broadcast``: a module with inner modules and parameters of its own of which copies can stand in (``broadcast``).
* ``vmapped``: any other module with parameters of its own, together with everything inside it.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.broadcast import takes_copies
from dp_lightning.privacy.gradients.convolution import Patches, TransposedPatches
from dp_lightning.privacy.gradients.embedding import EmbeddingRule
from dp_lightning.privacy.gradients.linear import Tokens
from dp_lightning.privacy.gradients.normalization import (
    ActivatedGroupNormRule,
    NormRule,
    channels_layer_norm,
    group_norm,
    identity,
    instance_norm,
    layer_norm,
    rms_norm,
)
from dp_lightning.privacy.gradients.products import ProductRule
from dp_lightning.privacy.gradients.rule import Rule
from dp_lightning.privacy.gradients.standardized import StandardizedPatches

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: ProductRule(Tokens),
    nn.Conv1d: ProductRule(Patches),
    nn.Conv2d: ProductRule(Patches),
    nn.Conv3d: ProductRule(Patches),
    nn.ConvTranspose1d: ProductRule(TransposedPatches),
    nn.ConvTranspose2d: ProductRule(TransposedPatches),
    nn.ConvTranspose3d: ProductRule(TransposedPatches),
    nn.Embedding: EmbeddingRule(),
    nn.GroupNorm: NormRule(group_norm, channels=True),
    nn.InstanceNorm1d: NormRule(instance_norm, channels=True),
    nn.InstanceNorm2d: NormRule(instance_norm, channels=True),
    nn.InstanceNorm3d: NormRule(instance_norm, channels=True),
    nn.LayerNorm: NormRule(layer_norm, channels=False),
    nn.RMSNorm: NormRule(rms_norm, channels=False),
}

# By name, so that this package need not import those that define them.
NAMED_RULES: dict[str, Rule] = {
    "timm.layers.layer_scale.LayerScale": NormRule(identity, channels=False, scale="gamma"),
    "timm.layers.layer_scale.LayerScale2d": NormRule(identity, channels=True, scale="gamma"),
    "timm.layers.norm.GroupNorm": NormRule(group_norm, channels=True),
    "timm.layers.norm.GroupNorm1": NormRule(group_norm, channels=True),
    "timm.layers.norm.LayerNorm": NormRule(layer_norm, channels=False),
    "timm.layers.norm.LayerNormFp32": NormRule(layer_norm, channels=False),
    "timm.layers.norm.LayerNorm2d": NormRule(channels_layer_norm, channels=True),
    "timm.layers.norm.LayerNorm2dFp32": NormRule(channels_layer_norm, channels=True),
    "timm.layers.norm.RmsNorm": NormRule(rms_norm, channels=False),
    "timm.layers.norm_act.GroupNorm1Act": ActivatedGroupNormRule(),
    "timm.layers.norm_act.GroupNormAct": ActivatedGroupNormRule(),
    "timm.layers.std_conv.ScaledStdConv2d": ProductRule(StandardizedPatches),
    "timm.layers.std_conv.StdConv2d": ProductRule(StandardizedPatches),
    "torchvision.models.convnext.LayerNorm2d": NormRule(channels_layer_norm, channels=True),
}


@dataclass(frozen=True)
class Unit:
    """One module, its name in the model, and its trained parameters (own name to parameter)."""

    name: str
    module: nn.Module
    kind: str
    parameters: dict[str, nn.Parameter]

    @property
    def rule(self) -> Rule:
        """The rule of a unit of kind ``rule``."""
        rule = rule_of(self.module)
        assert rule is not None
        return rule


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of the module's type, if there is one."""
    if isinstance(module, _ConvTransposeNd) and any(
        extra >= stride for extra, stride in zip(module.output_padding, module.stride, strict=True)
    ):
        return None  # more positions than the convolution that it is the gradient of has
    kind = type(module)
    return RULES.get(kind) or NAMED_RULES.get(f"{kind.__module__}.{kind.__qualname__}")


def units_of(model: nn.Module) -> list[Unit]:
    """Every trained parameter of the model belongs to at least one unit; to several where it is shared.

    Raises:
        ModelError: for a module that cannot be watched.
    """
    return list(_walk("", model, set()))


def _walk(name: str, module: nn.Module, walked: set[int]) -> list[Unit]:
    if id(module) in walked:
        return []  # stands in the model twice; its calls are watched wherever they come from
    walked.add(id(module))
    everything = {key: p for key, p in module.named_parameters() if p.requires_grad}
    if everything and isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"'{name}' is a ScriptModule, whose layers cannot be watched. Use the module before scripting."
        )
    own = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
    inner = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
    if own and not inner and rule_of(module) is not None and set(own) <= {"weight", "bias", "gain", "gamma"}:
        return [Unit(name, module, "rule", own)]
    # Attention of torch uses the parameters of a layer inside without calling it.
    whole = (bool(own) and not (inner and takes_copies(module, own))) or isinstance(module, nn.MultiheadAttention)
    if everything and whole:
        return [Unit(name, module, "vmapped", everything)]
    units = [Unit(name, module, "broadcast", own)] if own else []
    for key, child in inner:
        units += _walk(f"{name}.{key}" if name else key, child, walked)
    return units
