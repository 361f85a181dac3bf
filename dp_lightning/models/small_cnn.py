"""A network of two convolutions for small images such as the 8x8 digits of the quick start.

    conv 3x3 - GroupNorm - ReLU - conv 3x3 - ReLU - average pool 2x2 - GroupNorm per channel - linear

The last norm removes each channel's mean from the features. Features after a ReLU share a large mean, which would use
up the clipping norm of the linear layer's gradient without telling classes apart. The norms have no scale and shift:
each parameter adds noise to a private gradient.
"""

from torch import Tensor, nn

NUM_GROUPS = 4


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer: (N, in_channels, image_size, image_size) to (N, num_classes).

    Args:
        image_size: Height and width of the images in pixels, at least 4.
        channels: Channels of each convolution, a multiple of 4.

    Raises:
        ValueError: ``channels`` is not a multiple of 4.

    With the defaults and 10 classes it has 5,050 parameters.
    """

    def __init__(self, num_classes: int, *, in_channels: int = 1, image_size: int = 8, channels: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1),
            nn.GroupNorm(NUM_GROUPS, channels, affine=False),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.GroupNorm(channels, channels, affine=False),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(channels * (image_size // 2) ** 2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))
