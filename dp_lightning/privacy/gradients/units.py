"""Cuts a model into units: the modules at which per-example gradients are taken, and how at each.

* ``rule``: a layer that a rule of ours knows. Types are matched exactly, since a subclass may compute something else.
* ``broadcast``: a module with inner modules and a parameter of leading size 1 of its own (``cls_token``,
  ``pos_embed``). While it runs, the parameter is replaced by one copy per example.
* ``vmapped``: any other module with parameters of its own, together with everything inside it.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from dp_lightning.privacy.gradients.convolution import ConvolutionRule, TransposedConvolutionRule
from dp_lightning.privacy.gradients.linear import LinearRule
from dp_lightning.privacy.gradients.normalization import (
    ChannelNormRule,
    LastDimensionsNormRule,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from dp_lightning.privacy.gradients.rule import Rule

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: LinearRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.Conv3d: ConvolutionRule(),
    nn.ConvTranspose1d: TransposedConvolutionRule(),
    nn.ConvTranspose2d: TransposedConvolutionRule(),
    nn.ConvTranspose3d: TransposedConvolutionRule(),
    nn.GroupNorm: ChannelNormRule(group_norm),
    nn.InstanceNorm1d: ChannelNormRule(instance_norm),
    nn.InstanceNorm2d: ChannelNormRule(instance_norm),
    nn.InstanceNorm3d: ChannelNormRule(instance_norm),
    nn.LayerNorm: LastDimensionsNormRule(layer_norm),
    nn.RMSNorm: LastDimensionsNormRule(rms_norm),
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
        return RULES[type(self.module)]


def units_of(model: nn.Module) -> list[Unit]:
    """Every trained parameter of the model belongs to at least one unit; to several where it is shared."""
    return list(_walk("", model))


def _walk(name: str, module: nn.Module) -> list[Unit]:
    own = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
    inner = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
    if own and type(module) in RULES and set(own) <= {"weight", "bias"}:
        return [Unit(name, module, "rule", own)]
    if own and not (inner and all(_leading_one(p) for p in own.values())):
        everything = {key: p for key, p in module.named_parameters() if p.requires_grad}
        return [Unit(name, module, "vmapped", everything)]
    units = [Unit(name, module, "broadcast", own)] if own else []
    for key, child in inner:
        units += _walk(f"{name}.{key}" if name else key, child)
    return units


def _leading_one(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.shape[0] == 1
