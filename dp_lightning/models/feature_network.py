"""A frozen network as a source of features: what a linear probe stands on."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_lightning.errors import ConfigurationError
from dp_lightning.models.pretrained import timm_model
from dp_lightning.models.pretrained_input import PretrainedInput


class FeatureNetwork(nn.Module):
    """Pooled features of a pretrained timm network: images (N, C, H, W) as the data gives them to float32 (N, D).

    It stays in evaluation mode, and nothing in it is trained.

    Args:
        weights: File with its weights; None downloads timm's.
        digest: SHA-256 of that file, where it has to be a certain one.
        input_size: Height and width that images are resized to; None is the network's own, or its ``img_size``.

    Attributes:
        settings: the arguments, from which the same network can be made again; plain types.

    Raises:
        ConfigurationError: the network cannot be built, or the file is another one.
    """

    def __init__(
        self,
        backbone: str,
        *,
        weights: str | None,
        input_size: int | None,
        backbone_kwargs: dict[str, Any],
        in_channels: int,
        mean: Sequence[float],
        std: Sequence[float],
        digest: str | None = None,
    ) -> None:
        super().__init__()
        self.network: Any = timm_model(
            backbone, 0, pretrained=weights is None, weights=weights, in_channels=in_channels, **backbone_kwargs
        )
        found = None if weights is None else hashlib.sha256(Path(weights).read_bytes()).hexdigest()
        if digest is not None and digest != found:
            raise ConfigurationError(
                f"weights {weights} are not those that the features of this run came from. Put that file back."
            )
        self.prepare = PretrainedInput.of(
            self.network,
            in_channels=in_channels,
            data_mean=mean,
            data_std=std,
            size=input_size or backbone_kwargs.get("img_size"),
        )
        self.settings: dict[str, Any] = {
            "backbone": backbone,
            "weights": weights,
            "digest": found,
            "input_size": input_size,
        }
        self.settings |= {"backbone_kwargs": backbone_kwargs, "in_channels": in_channels}
        self.settings |= {"mean": list(mean), "std": list(std)}
        self.requires_grad_(False)
        self.train()

    @classmethod
    def again(cls, settings: Mapping[str, Any], *, weights: str | None, setting: str) -> "FeatureNetwork":
        """The network of these `settings` once more, with its file of weights where it lay, or where it lies now.

        Raises:
            ConfigurationError: the file is missing, or another one.
        """
        path = weights or settings["weights"]
        if path is not None and not Path(path).is_file():
            raise ConfigurationError(
                f"The features of this run came from the network in {path}, which is not a file here. Name its place "
                f"by {setting}."
            )
        return cls(**{**settings, "weights": path})

    @property
    def length(self) -> int:
        """D, the length of a feature vector."""
        # Some networks have layers behind their features that stay when the classifier is taken off.
        return int(getattr(self.network, "head_hidden_size", None) or self.network.num_features)

    def train(self, mode: bool = True) -> "FeatureNetwork":
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(self.prepare(images))
        return features.to(torch.float32)
