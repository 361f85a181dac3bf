"""One LightningModule for each network of ``dp_lightning.models``; the arguments are the network's."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.lightning_modules.base import ImageClassifier
from dp_lightning.models import ResNet, SmallCNN, WideResNet


class WideResNetModule(ImageClassifier):
    """Wide residual network WRN-``depth``-``width`` with GroupNorm, for images of 28 to 64 pixels.

    Args:
        num_classes: Number of classes, linked from the data.
        depth: Number of convolutional layers: 10, 16, 22, 28, 40, ...
        width: Factor on the channels 16, 32, 64 of the three groups.
        in_channels: Channels of the images, linked from the data.
        num_groups: Groups of every GroupNorm; it must divide 16 and 16 * ``width``.
        weight_standardization: Standardise the weights of every convolution, as in De et al. 2022.
        relu_first: ReLU before GroupNorm instead of after it, as in De et al. 2022.
        scale_norm: GroupNorm after each addition of a block, as in Klause et al. 2022.
        whitening: Centre and whiten the features before the last layer by random images, if ``weights`` are of
            `dpl pretrain` with this setting; without them it does nothing.
        **kwargs: Those of `ImageClassifier`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        depth: int = 16,
        width: int = 4,
        in_channels: int = 3,
        num_groups: int = 16,
        weight_standardization: bool = False,
        relu_first: bool = False,
        scale_norm: bool = False,
        whitening: bool = False,
        **kwargs: Any,
    ) -> None:
        model = WideResNet(
            depth,
            width,
            num_classes,
            in_channels=in_channels,
            num_groups=num_groups,
            weight_standardization=weight_standardization,
            relu_first=relu_first,
            scale_norm=scale_norm,
            whitening=whitening,
        )
        super().__init__(model, num_classes, **kwargs)
        self.save_hyperparameters()


class ResNetModule(ImageClassifier):
    """ResNet-``depth`` with GroupNorm.

    Args:
        num_classes: Number of classes, linked from the data.
        depth: 18 or 50.
        stem: ``imagenet`` (7x7 convolution of stride 2 and max pooling) for images of about 224 pixels,
            ``cifar`` (3x3 convolution of stride 1) for images of 28 to 64 pixels.
        in_channels: Channels of the images, linked from the data.
        num_groups: Groups of every GroupNorm; it must divide 64.
        whitening: Centre and whiten the features before the last layer by random images, if ``weights`` are of
            `dpl pretrain` with this setting; without them it does nothing.
        **kwargs: Those of `ImageClassifier`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        depth: Literal[18, 50] = 18,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        in_channels: int = 3,
        num_groups: int = 32,
        whitening: bool = False,
        **kwargs: Any,
    ) -> None:
        model = ResNet(
            depth,
            num_classes,
            stem=stem,
            in_channels=in_channels,
            num_groups=num_groups,
            whitening=whitening,
        )
        super().__init__(model, num_classes, **kwargs)
        self.save_hyperparameters()


class SmallCNNModule(ImageClassifier):
    """A small convolutional network for images such as the 8x8 digits.

    Args:
        num_classes: Number of classes, linked from the data.
        in_channels: Channels of the images, linked from the data.
        image_size: Height and width of the images in pixels, linked from the data.
        channels: Channels of each convolution, a multiple of 4.
        **kwargs: Those of `ImageClassifier`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int = 3,
        image_size: int = 8,
        channels: int = 16,
        **kwargs: Any,
    ) -> None:
        model = SmallCNN(num_classes, in_channels=in_channels, image_size=image_size, channels=channels)
        super().__init__(model, num_classes, **kwargs)
        self.save_hyperparameters()


class UnitLength(nn.Module):
    """(N, D) to (N, D), each row divided by its Euclidean norm; a row of zeros stays zero."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=1)


class LinearProbeModule(ImageClassifier):
    """One linear layer on features, such as those of ``CachedFeatures``.

    Args:
        num_classes: Number of classes, linked from the data.
        in_channels: Length D of a feature vector, or the channels of a map, linked from the data.
        image_size: Height and width of a map of features, linked from the data; 1 for a vector.
        normalize: Normalise the features of each image, so that the length of its gradient does not depend on their
            length: true to mean 0 and variance 1, ``unit`` to the length 1. With long vectors, such as maps, the
            first lets every gradient be clipped.
        **kwargs: Those of `ImageClassifier`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int,
        image_size: int = 1,
        normalize: bool | Literal["unit"] = True,
        **kwargs: Any,
    ) -> None:
        length = in_channels * image_size**2
        head = nn.Linear(length, num_classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        norm: nn.Module = nn.Identity()
        if normalize == "unit":
            norm = UnitLength()
        elif normalize:
            norm = nn.LayerNorm(length, elementwise_affine=False)
        before = norm if image_size == 1 else nn.Sequential(nn.Flatten(), norm)
        model = nn.Sequential(before, head)
        super().__init__(model, num_classes, **kwargs)
        self.save_hyperparameters()


#: Modules whose networks are this library's own, whole and without weights from elsewhere but for ``weights``.
OWN_NETWORKS = (ResNetModule, SmallCNNModule, WideResNetModule)
