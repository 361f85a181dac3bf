"""What a first run trains: one layer on the features of a pretrained network, or a small network from scratch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dp_lightning.commands.starting_point import FEW_IMAGES
from dp_lightning.models import SmallCNN, WideResNet
from dp_lightning.models.feature_network import FeatureNetwork, has_weights
from dp_lightning.models.pretrained import without_weights

#: As in configs/probe_cifar10.yaml.
BACKBONE = "vit_small_patch16_224.augreg_in21k"
# Largest side of an image, in pixels: what that network sees, and what a network from scratch sees.
_FEATURE_SIDE, _SCRATCH_SIDE = 224, 32
_SMALLEST_SIDE = 8


@dataclass(frozen=True)
class Features:
    """One layer on the features of a network.

    Attributes:
        backbone: the network's name in timm's registry, or ``scattering``.
        weights: file of its weights; None downloads timm's.
    """

    backbone: str = BACKBONE
    weights: str | None = None

    @property
    def scatters(self) -> bool:
        """Whether the features need no pretrained network. They are maps, taken at the length 1."""
        return not has_weights(self.backbone)

    @property
    def has_seen_colours(self) -> bool:
        """Whether it was trained on images in colour, as it then is given."""
        return not self.scatters

    def image_size(self, median_side: int) -> int:
        """Height and width of the images that it is given, in pixels; a pretrained network resizes them itself."""
        if self.scatters:
            return min(max(median_side // 4 * 4, _SMALLEST_SIDE), _SCRATCH_SIDE)
        return min(max(median_side, _SMALLEST_SIDE), _FEATURE_SIDE)

    def num_parameters(self, *, num_classes: int, in_channels: int, image_size: int) -> int:
        """d, the parameters of the layer; no weights are read.

        Raises:
            ConfigurationError: the backbone is unknown.
        """
        with torch.device("meta"), without_weights():
            network = FeatureNetwork(
                self.backbone,
                weights=None,
                input_size=None,
                backbone_kwargs={},
                in_channels=in_channels,
                mean=(0.5,),
                std=(0.5,),
            )
        return (network.length * network.map_size(image_size) ** 2 + 1) * num_classes


@dataclass(frozen=True)
class Network:
    """A network that is trained from scratch.

    Attributes:
        class_path: of its LightningModule.
        settings: its init_args, without what comes from the data.
    """

    class_path: str
    settings: dict[str, Any] = field(default_factory=dict)
    #: It starts at random.
    has_seen_colours = False

    @classmethod
    def for_images(cls, count: int) -> "Network":
        """The smaller one for few images: noise grows with the number of parameters."""
        if count < FEW_IMAGES:
            return cls("SmallCNNModule", {"channels": 16})
        return cls("WideResNetModule", {"depth": 16, "width": 4})

    def image_size(self, median_side: int) -> int:
        """Height and width of an image, in pixels: a multiple of 4, at most 32."""
        return min(max(median_side // 4 * 4, _SMALLEST_SIDE), _SCRATCH_SIDE)

    def num_parameters(self, *, num_classes: int, in_channels: int, image_size: int) -> int:
        """d."""
        with torch.device("meta"):
            network: nn.Module
            if self.class_path == "SmallCNNModule":
                network = SmallCNN(num_classes, in_channels=in_channels, image_size=image_size, **self.settings)
            else:
                network = WideResNet(num_classes=num_classes, in_channels=in_channels, **self.settings)
        return sum(parameter.numel() for parameter in network.parameters())
