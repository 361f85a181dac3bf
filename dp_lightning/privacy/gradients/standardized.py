"""Weight-standardised convolutions, whose parameter is not what multiplies the patches (Qiao et al. 2019).

With one row w of the weight per output, m its mean, v its variance, w_hat = (w - m) / sqrt(v + eps), and s the scale
times the gain of Brock et al. 2021 (1 without gain), the convolution uses s * w_hat. A gradient a of that row pulls
back to

    grad w    = s / sqrt(v + eps) * (a - mean(a) - w_hat * mean(a * w_hat)),
    grad gain = scale * sum(a * w_hat).
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from dp_lightning.privacy.gradients.convolution import Patches


class StandardizedPatches(Patches):
    """Of timm's ``StdConv2d`` and ``ScaledStdConv2d``, with fixed padding: with the way back to the parameters."""

    def __init__(self, conv: _ConvNd, inputs: Tensor, grad_output: Tensor, augmult: int) -> None:
        super().__init__(conv, inputs, grad_output, augmult)
        rows = self.rows_of(conv.weight.detach())
        eps, scale = cast(float, conv.eps), cast(float, getattr(conv, "scale", 1.0))
        variance, mean = torch.var_mean(rows, dim=-1, correction=0, keepdim=True)
        inverse = (variance + eps).rsqrt()  # (groups, outputs, 1)
        self._normalized = (rows - mean) * inverse
        gain = conv._parameters.get("gain")
        self._gain_shape = None if gain is None else gain.shape
        self._scale = 1.0 if gain is None else scale
        self._slope = inverse if gain is None else inverse * gain.detach().view_as(inverse) * self._scale

    @property
    def stretch(self) -> Tensor:
        return self._slope.abs().max()

    def pull_back(self, gradients: Tensor) -> dict[str, Tensor]:
        normalized = self._normalized.to(gradients.dtype)
        along = torch.linalg.vecdot(gradients, normalized).unsqueeze(-1)  # (r, groups, outputs, 1)
        size = gradients.shape[-1]
        gradients.sub_(gradients.mean(-1, keepdim=True)).addcmul_(along, normalized, value=-1 / size)
        gradients.mul_(self._slope)
        if self._gain_shape is None:
            return {}
        return {"gain": (along * self._scale).view(len(along), *self._gain_shape)}
