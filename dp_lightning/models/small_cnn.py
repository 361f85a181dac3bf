"""A network of two convolutions for small images such as the 8x8 digits of the quick start.

    conv 3x3 - GroupNorm - ReLU - pool 2x2 - conv 3x3 - GroupNorm - ReLU - pool 2x2 - linear

It is small because the noise on a private gradient grows with the square root of the number of parameters.
"""

from torch import Tensor, nn

from dp_lightning.errors import ModelError


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer: (N, in_channels, image_size, image_size) to (N, num_classes).

    Args:
        num_classes: Number of logits.
        in_channels: Channels of the images.
        image_size: Height and width of the images in pixels, at least 4.
        channels: Channels of the first convolution; the second has twice as many. A multiple of 4.

    Raises:
        ModelError: ``image_size`` is below 4, or ``channels`` is not a multiple of 4.

    With the defaults and 10 classes it has 6,186 parameters.
    """

    def __init__(
        self, num_classes: int, *, in_channels: int = 1, image_size: int = 8, channels: int = 16
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise ModelError(f"image_size must be at least 4 pixels for two poolings, not {image_size}")
        if channels < 4 or channels % 4:
            raise ModelError(f"channels must be a multiple of 4, not {channels}")
        num_groups = 4
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1),
            nn.GroupNorm(num_groups, channels),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.GroupNorm(num_groups, 2 * channels),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * channels * (image_size // 4) ** 2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))
