"""ResNet-18 and ResNet-50 (He et al. 2016) with GroupNorm (Wu and He 2018), built on torchvision's networks.

GroupNorm has as many scales and shifts as BatchNorm, so the parameter counts are torchvision's: 11,689,512 and
25,557,032 with the ImageNet stem and 1000 classes.
"""

from functools import partial
from typing import Literal

from torch import nn
from torchvision.models import resnet

from dp_lightning.errors import ModelError
from dp_lightning.models.whitening import Whitening

BASE_CHANNELS = 64


# The kind of block, and the number of blocks in each of the four stages.
_STAGES: dict[int, tuple[type[resnet.BasicBlock | resnet.Bottleneck], list[int]]] = {
    18: (resnet.BasicBlock, [2, 2, 2, 2]),
    50: (resnet.Bottleneck, [3, 4, 6, 3]),
}


class ResNet(resnet.ResNet):
    """A residual network of four stages: (N, in_channels, H, W) to logits (N, num_classes).

    Args:
        stem: ``imagenet`` is the 7x7 convolution of stride 2 and the max pooling of the paper, for images of
            about 224 pixels; ``cifar`` is a 3x3 convolution of stride 1 without pooling, for images of 28 to
            64 pixels.
        num_groups: Groups of every GroupNorm; it must divide 64.
        whitening: `Whitening` of the features before the last layer, which pretraining fits.

    Raises:
        ModelError: ``depth`` or ``stem`` is unknown.
        ValueError: ``num_groups`` does not divide 64.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int,
        *,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        in_channels: int = 3,
        num_groups: int = 32,
        whitening: bool = False,
    ) -> None:
        if depth not in _STAGES or stem not in ("imagenet", "cifar"):
            raise ModelError(f"depth must be 18 or 50, and stem imagenet or cifar, not {depth} and {stem!r}")
        block, blocks = _STAGES[depth]
        super().__init__(block, blocks, num_classes=num_classes, norm_layer=partial(nn.GroupNorm, num_groups))
        if stem == "cifar":
            self.conv1 = nn.Conv2d(in_channels, BASE_CHANNELS, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, BASE_CHANNELS, 7, stride=2, padding=3, bias=False)
        if whitening:
            self.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), Whitening(self.fc.in_features))
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, nn.ReLU):
                # An in-place ReLU overwrites the norm's output, which hooks on the norm still need.
                module.inplace = False
