"""Wide residual networks (Zagoruyko and Komodakis 2016) with GroupNorm in place of BatchNorm.

WRN-d-k has three groups of (d - 4) / 6 pre-activation blocks with 16k, 32k and 64k channels:

    y = conv2(relu(norm2(conv1(relu(norm1(x)))))) + shortcut

where the shortcut is the identity, or a 1x1 convolution of ``relu(norm1(x))`` when the shape changes.
GroupNorm (Wu and He 2018) normalises each example by itself, so that no example enters another one's
gradient; 16 groups are the choice of De et al. 2022.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.errors import ModelError

STEM_CHANNELS = 16


def group_norm(num_groups: int, channels: int) -> nn.GroupNorm:
    """GroupNorm with scale and shift.

    Raises:
        ModelError: ``num_groups`` does not divide ``channels``.
    """
    if num_groups < 1 or channels % num_groups:
        raise ModelError(f"num_groups={num_groups} does not divide a layer's {channels} channels; choose a divisor")
    return nn.GroupNorm(num_groups, channels)


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after a norm and a ReLU: (N, in, H, W) to (N, out, H / stride, W /
    stride)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = group_norm(num_groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = group_norm(num_groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        residual = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """WRN-``depth``-``width`` for images of 28 to 64 pixels: (N, in_channels, H, W) to (N, num_classes).

    Args:
        depth: Number of convolutional layers as the paper counts them: 10, 16, 22, 28, 40, ...
        width: Factor k on the channels 16, 32, 64 of the three groups.
        num_classes: Number of logits.
        in_channels: Channels of the images.
        num_groups: Groups of every GroupNorm; it must divide 16 and 16 * ``width``.

    Raises:
        ModelError: ``depth`` is not 6n + 4 with n >= 1, or ``num_groups`` does not divide a layer's channels.

    ``WideResNet(16, 4, 10)`` has 2,748,890 parameters.
    """

    def __init__(self, depth: int, width: int, num_classes: int, *, in_channels: int = 3, num_groups: int = 16) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ModelError(f"depth must be 6n + 4 (10, 16, 22, 28, 34, 40, ...), not {depth}")
        if width < 1:
            raise ModelError(f"width must be at least 1, not {width}")
        blocks_per_group = (depth - 4) // 6
        self.stem = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        channels = STEM_CHANNELS
        for out_channels, first_stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for index in range(blocks_per_group):
                stride = first_stride if index == 0 else 1
                blocks.append(PreActivationBlock(channels, out_channels, stride=stride, num_groups=num_groups))
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = group_norm(num_groups, channels)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.norm(self.blocks(self.stem(images))))
        return self.classifier(features.mean(dim=(2, 3)))
