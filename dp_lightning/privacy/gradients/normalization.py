"""Normalisation within one example: grad gamma_i is the sum of g_i * x_hat_i, grad beta_i the sum of g_i.

The sums run over all that shares an entry of gamma: the positions of a channel, or the tokens. A scale alone is the
same with x in the place of x_hat.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.contribution import Contribution, PerExample, sum_of_views
from dp_lightning.privacy.gradients.ways import examples_at_a_time


class Normalize(Protocol):
    """The module's own normalisation without scale and shift, in memory of its own."""

    def __call__(self, module: nn.Module, inputs: Tensor) -> Tensor: ...


class NormRule:
    """Rule of norms with a scale and a shift, and of a scale alone.

    Args:
        normalize: from the module and its input (b, ...) to the normalised input.
        channels: whether scale and shift belong to dimension 1 (GroupNorm, InstanceNorm), or to the last dimensions,
            which have the scale's shape (LayerNorm, RMSNorm).
        scale: the module's name of gamma.
    """

    def __init__(self, normalize: Normalize, *, channels: bool, scale: str = "weight") -> None:
        self._normalize, self._channels, self._scale = normalize, channels, scale

    def contribution(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str], augmult: int
    ) -> Contribution:
        last = inputs.dim() if self._channels else inputs.dim() - module.get_parameter(self._scale).dim()
        dims = tuple(range(2 if self._channels else 1, last))
        gradients: dict[str, list[Tensor]] = {own: [] for own in names}
        step = examples_at_a_time(3 * inputs[0].numel(), inputs.device)
        for x, g in zip(inputs.split(step), grad_output.split(step), strict=True):
            g = g.to(torch.promote_types(g.dtype, torch.float32))
            if self._scale in names:
                gradients[self._scale].append(_sum(self._normalize(module, x.to(g.dtype)).mul_(g), dims))
            if "bias" in names:
                gradients["bias"].append(_sum(g, dims))
        rows = {name: torch.cat(gradients[own]) for own, name in names.items()}
        return PerExample({name: sum_of_views(row, augmult) for name, row in rows.items()}, "by rule")


class ActivatedGroupNormRule:
    """Rule of a GroupNorm that ends in an activation ``act``, such as timm's ``GroupNormAct``."""

    def contribution(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str], augmult: int
    ) -> Contribution:
        norm, act = cast(nn.GroupNorm, module), cast(nn.Module, module.act)
        if not isinstance(module.drop, nn.Identity):
            raise ModelError(
                f"A {type(module).__name__} with dropout inside is not supported. Put the dropout behind it."
            )
        seen = F.group_norm(inputs.to(grad_output.dtype), norm.num_groups, norm.weight, norm.bias, norm.eps)
        seen = seen.detach().requires_grad_()
        with torch.enable_grad():
            # The activation may work in place, which a leaf forbids.
            (gradient,) = torch.autograd.grad(act(seen.clone()), seen, grad_output)
        return NormRule(group_norm, channels=True).contribution(module, inputs, gradient, names, augmult)


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``tensor.sum(())`` would sum everything."""
    return tensor.sum(dims) if dims else tensor


def group_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    """Normalised over groups of channels."""
    assert isinstance(module, nn.GroupNorm)
    return F.group_norm(inputs, module.num_groups, eps=module.eps)


def instance_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    """Normalised over the positions of each channel."""
    if module.track_running_stats and not module.training:
        raise ModelError(
            f"{type(module).__name__} with track_running_stats=True normalises by other examples' statistics while "
            "evaluating. Set track_running_stats=False."
        )
    return F.group_norm(inputs, inputs.shape[1], eps=float(module.eps))  # type: ignore[arg-type]


def layer_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    """Normalised over the last dimensions."""
    return F.layer_norm(inputs, module.get_parameter("weight").shape, eps=float(module.eps))  # type: ignore[arg-type]


def rms_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    """Divided by the root of the mean square over the last dimensions."""
    eps: float | None = module.eps  # type: ignore[assignment]
    return F.rms_norm(inputs, module.get_parameter("weight").shape, eps=eps)


def channels_layer_norm(module: nn.Module, inputs: Tensor) -> Tensor:
    """Normalised over the channels, dimension 1, at each position."""
    return layer_norm(module, inputs.movedim(1, -1)).movedim(-1, 1)


def identity(module: nn.Module, inputs: Tensor) -> Tensor:
    """Not normalised: the module is a scale alone."""
    return inputs.clone()
