"""Wide residual networks (Zagoruyko and Komodakis 2016) with GroupNorm in place of BatchNorm.

WRN-d-k has three groups of (d - 4) / 6 pre-activation blocks with 16k, 32k and 64k channels:

    y = conv2(relu(norm2(conv1(relu(norm1(x)))))) + shortcut

where the shortcut is the identity, or a 1x1 convolution of ``relu(norm1(x))`` when the shape changes.
GroupNorm (Wu and He 2018) normalises each example separately, so that no example affects another one's gradient; 16
groups are the choice of De et al. 2022.

De et al. make two more changes: the ReLU comes before the norm, and the weights of each convolution are standardised
(Qiao et al. 2019; Brock et al. 2021): each row w of the weight becomes gain * (w - mean(w)) / sqrt(n var(w)), where n
is its length and the gain is one number per output. The initial weights then have variance 1/n, as in their code: the
norm of w does not change the network, but a step of a given size turns a shorter w further.

ScaleNorm (Klause et al. 2022, "Differentially private training of residual networks with scale normalisation") is one
more GroupNorm after each addition, which brings the two things that are added to one scale for what follows.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.errors import ModelError
from dp_lightning.models.whitening import Whitening

STEM_CHANNELS = 16


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after a norm and a ReLU: (N, in, H, W) to (N, out, H / stride, W / stride).

    Args:
        relu_first: Whether the ReLU comes before the norm.
        scale_norm: Whether the sum is normalised.
        convolution: Builds a convolution from (in, out, kernel size, stride, padding).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        num_groups: int,
        relu_first: bool,
        scale_norm: bool,
        convolution: Callable[..., nn.Conv2d],
    ) -> None:
        super().__init__()
        self.relu_first = relu_first
        self.norm1 = nn.GroupNorm(num_groups, in_channels)
        self.conv1 = convolution(in_channels, out_channels, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = convolution(out_channels, out_channels, 3, stride=1, padding=1)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = convolution(in_channels, out_channels, 1, stride=stride, padding=0)
        self.scale_norm = nn.GroupNorm(num_groups, out_channels) if scale_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        activated = normalized_and_activated(self.norm1, x, relu_first=self.relu_first)
        inner = normalized_and_activated(self.norm2, self.conv1(activated), relu_first=self.relu_first)
        return self.scale_norm(self.conv2(inner) + (x if self.shortcut is None else self.shortcut(activated)))


def normalized_and_activated(norm: nn.GroupNorm, x: Tensor, *, relu_first: bool) -> Tensor:
    """norm(relu(x)) or relu(norm(x))."""
    return norm(F.relu(x)) if relu_first else F.relu(norm(x))


def standardized_convolution(in_channels: int, out_channels: int, size: int, *, stride: int, padding: int) -> nn.Conv2d:
    """A convolution with standardised weights, a gain of 1 per output and a bias, as in De et al. 2022."""
    from timm.layers.std_conv import ScaledStdConv2d  # timm is slow to import

    return ScaledStdConv2d(in_channels, out_channels, size, stride=stride, padding=padding)


class WideResNet(nn.Module):
    """WRN-``depth``-``width`` for images of 28 to 64 pixels: (N, in_channels, H, W) to (N, num_classes).

    Args:
        depth: Number of convolutional layers as the paper counts them: 10, 16, 22, 28, 40, ...
        width: Factor k on the channels 16, 32, 64 of the three groups.
        num_groups: Groups of every GroupNorm; it must divide 16 and 16 * ``width``.
        weight_standardization: Standardise the weights of every convolution, which then has a gain and a bias.
        relu_first: ReLU before GroupNorm instead of after it.
        scale_norm: GroupNorm after each addition of a block (ScaleNorm).
        whitening: `Whitening` of the features before the last layer, which pretraining fits.

    Raises:
        ModelError: ``depth`` is not 6n + 4 with n >= 1.
        ValueError: ``num_groups`` does not divide a layer's channels.

    ``WideResNet(16, 4, 10)`` has 2,748,890 parameters; standardised weights add 4,512, and ScaleNorm 1,792.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_classes: int,
        *,
        in_channels: int = 3,
        num_groups: int = 16,
        weight_standardization: bool = False,
        relu_first: bool = False,
        scale_norm: bool = False,
        whitening: bool = False,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ModelError(f"depth must be 6n + 4 (10, 16, 22, 28, 34, 40, ...), not {depth}")
        blocks_per_group = (depth - 4) // 6
        # A norm follows each plain convolution, so that a bias would change nothing.
        convolution = standardized_convolution if weight_standardization else partial(nn.Conv2d, bias=False)
        self.relu_first = relu_first
        self.stem = convolution(in_channels, STEM_CHANNELS, 3, stride=1, padding=1)
        blocks: list[nn.Module] = []
        channels = STEM_CHANNELS
        for out_channels, first_stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for index in range(blocks_per_group):
                stride = first_stride if index == 0 else 1
                blocks.append(
                    PreActivationBlock(
                        channels,
                        out_channels,
                        stride=stride,
                        num_groups=num_groups,
                        relu_first=relu_first,
                        scale_norm=scale_norm,
                        convolution=convolution,
                    )
                )
                channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(num_groups, channels)
        self.whitening = Whitening(channels) if whitening else nn.Identity()
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and weight_standardization:
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if weight_standardization:
            # Truncated at two standard deviations, which reduces the standard deviation by 12 %.
            std = channels**-0.5 / 0.8796
            nn.init.trunc_normal_(self.classifier.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = normalized_and_activated(self.norm, self.blocks(self.stem(images)), relu_first=self.relu_first)
        return self.classifier(self.whitening(features.mean(dim=(2, 3))))
