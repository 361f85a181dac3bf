"""A frozen network that computes features, on which a private layer or a small private network is trained."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.models.pretrained import PretrainedInput, timm_model
from dp_lightning.models.scattering import ScatteringFeatures

#: The backbone that needs no weights: `ScatteringFeatures`.
SCATTERING = "scattering"


class FeatureNetwork(nn.Module):
    """Features of images (N, C, H, W) of the data module, float32.

    Those of a pretrained timm network are pooled: (N, D). Those of ``scattering`` are maps (N, D, h, w) with D = K C,
    or with V views (N, V, D, h, w), as of `ScatteringFeatures`, which has no weights and needs no other data; its
    ``backbone_kwargs`` are ``scales``, ``angles``, ``mirror``, ``shift`` and ``average``. It stays in evaluation mode,
    and nothing in it is trained.

    Args:
        weights: File with its weights; None downloads timm's.
        digest: SHA-256 that this file must have; None accepts any file.
        input_size: Height and width that images are resized to; None uses ``img_size`` of ``backbone_kwargs`` if it is
            set, or else the network's own size. Scattering takes images of any size.

    Attributes:
        settings: the arguments as plain types, from which the same network can be built again.
        length: D, the length of a feature vector, or the channels of a map.
        num_views: V, or 1 where features have no views.
        stored_as: what its features are kept as in files.

    Raises:
        ConfigurationError: the network cannot be built, or the file has another digest.
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
        self.network: Any
        if backbone == SCATTERING:
            if weights is not None:
                raise ConfigurationError(f"The backbone scattering has no weights. Leave out weights: {weights}.")
            try:
                self.network = ScatteringFeatures(in_channels, **backbone_kwargs)
            except (ModelError, TypeError) as error:
                raise ConfigurationError(f"backbone_kwargs of scattering: {error}.") from error
            size = None if input_size is None else (input_size, input_size)
            self.prepare = PretrainedInput(size=size, data_mean=mean, data_std=std, mean=(0.0,), std=(1.0,))
            self.length, self.num_views = self.network.paths * in_channels, self.network.num_views
            # Maps are a hundred times larger than vectors, and their numbers lie around 0 and 1.
            self.stored_as = torch.float16
        else:
            self.network = timm_model(
                backbone, 0, pretrained=weights is None, weights=weights, in_channels=in_channels, **backbone_kwargs
            )
            self.prepare = PretrainedInput.of(
                self.network,
                in_channels=in_channels,
                data_mean=mean,
                data_std=std,
                size=input_size or backbone_kwargs.get("img_size"),
            )
            # Some networks have layers after their features that stay when the classifier is removed.
            self.length = int(getattr(self.network, "head_hidden_size", None) or self.network.num_features)
            self.stored_as, self.num_views = torch.float32, 1
        found = None if weights is None else hashlib.sha256(Path(weights).read_bytes()).hexdigest()
        if digest is not None and digest != found:
            raise ConfigurationError(
                f"weights {weights} are not those that computed the features of this run. Restore the original file."
            )
        self.settings: dict[str, Any] = {
            "backbone": backbone,
            "weights": weights,
            "digest": found,
            "input_size": input_size,
            "backbone_kwargs": backbone_kwargs,
            "in_channels": in_channels,
            "mean": list(mean),
            "std": list(std),
        }
        self.requires_grad_(False)
        self.train()

    @classmethod
    def again(cls, settings: Mapping[str, Any], *, weights: str | None, setting: str) -> "FeatureNetwork":
        """Build the network of these `settings` again, with its weights from the original path or from ``weights``.

        Raises:
            ConfigurationError: the file is missing, or is a different one.
        """
        path = weights or settings["weights"]
        if path is not None and not Path(path).is_file():
            raise ConfigurationError(
                f"The features of this run were computed by the network in {path}, which is not a file here. Set "
                f"{setting} to its path."
            )
        return cls(**{**settings, "weights": path})

    def map_size(self, image_size: int) -> int:
        """Return height and width of the features of an image; 1 where they are a vector."""
        if not isinstance(self.network, ScatteringFeatures):
            return 1
        return self.network.size(self.settings["input_size"] or image_size)

    @property
    def device(self) -> torch.device:
        return self.prepare.scale.device

    def train(self, mode: bool = True) -> "FeatureNetwork":
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(self.prepare(images))
        return features.to(torch.float32)
