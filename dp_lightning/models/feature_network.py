"""A frozen network that computes features, on which a private layer or a small private network is trained."""

import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.models.pretrained import timm_model
from dp_lightning.models.pretrained_input import PretrainedInput
from dp_lightning.models.scattering_features import ScatteringFeatures

#: The backbone that needs no weights: `ScatteringFeatures`.
SCATTERING = "scattering"


class FeatureNetwork(nn.Module):
    """Features of images (N, C, H, W) of the data module, float32.

    Those of a pretrained timm network are pooled: (N, D). Those of ``scattering`` are maps (N, D, h, w) with D = K C,
    as of `ScatteringFeatures`, which has no weights and needs no other data; its ``backbone_kwargs`` are ``scales``,
    ``angles`` and ``mirror``. It stays in evaluation mode, and nothing in it is trained.

    Args:
        weights: File with its weights; None downloads timm's.
        digest: SHA-256 that this file must have; None accepts any file.
        input_size: Height and width that images are resized to; None uses ``img_size`` of ``backbone_kwargs`` if it is
            set, or else the network's own size. Scattering takes images of any size.

    Attributes:
        settings: the arguments as plain types, from which the same network can be built again.
        length: D, the length of a feature vector, or the channels of a map.
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
        images = _Images(in_channels, mean, std, input_size)
        if backbone == SCATTERING:
            features = _scattering(weights, backbone_kwargs, images)
        elif difflib.get_close_matches(backbone, [SCATTERING], cutoff=0.8):
            raise ConfigurationError(f"There is no network {backbone!r}; did you mean {SCATTERING}?")
        else:
            features = _pretrained(backbone, weights, backbone_kwargs, images)
        self.network, self.prepare = features.network, features.prepare
        self.length, self.stored_as, self._map_size = features.length, features.stored_as, features.map_size
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
        }
        self.settings |= {"backbone_kwargs": backbone_kwargs, "in_channels": in_channels}
        self.settings |= {"mean": list(mean), "std": list(std)}
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
        """Height and width of the features of an image; 1 where they are a vector."""
        return self._map_size(self.settings["input_size"] or image_size)

    @property
    def device(self) -> torch.device:
        return self.prepare.scale.device

    def train(self, mode: bool = True) -> "FeatureNetwork":
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(self.prepare(images))
        return features.to(torch.float32)


def has_weights(backbone: str) -> bool:
    """Whether a backbone's weights come from a file or a download."""
    return backbone != SCATTERING


@dataclass(frozen=True)
class _Images:
    """What the network is given: ``size`` is that which images are resized to, if they are."""

    channels: int
    mean: Sequence[float]
    std: Sequence[float]
    size: int | None


@dataclass(frozen=True)
class _Features:
    """A network with what is before it, and what comes out: `FeatureNetwork.length`, ``stored_as`` and ``map_size``."""

    network: nn.Module
    prepare: PretrainedInput
    length: int
    stored_as: torch.dtype
    map_size: Callable[[int], int]


def _pretrained(backbone: str, weights: str | None, settings: dict[str, Any], images: _Images) -> _Features:
    network: Any = timm_model(
        backbone, 0, pretrained=weights is None, weights=weights, in_channels=images.channels, **settings
    )
    prepare = PretrainedInput.of(
        network,
        in_channels=images.channels,
        data_mean=images.mean,
        data_std=images.std,
        size=images.size or settings.get("img_size"),
    )
    # Some networks have layers after their features that stay when the classifier is removed.
    length = int(getattr(network, "head_hidden_size", None) or network.num_features)
    return _Features(network, prepare, length, torch.float32, lambda image_size: 1)


def _scattering(weights: str | None, settings: dict[str, Any], images: _Images) -> _Features:
    if weights is not None:
        raise ConfigurationError(f"The backbone scattering has no weights. Leave out weights: {weights}.")
    if others := sorted(settings.keys() - {"scales", "angles", "mirror"}):
        raise ConfigurationError(
            f"The backbone scattering has no setting {', '.join(others)}. Its backbone_kwargs are scales, angles and "
            "mirror."
        )
    try:
        network = ScatteringFeatures(images.channels, **settings)
    except ModelError as error:
        raise ConfigurationError(f"backbone_kwargs: {error}.") from error
    size = None if images.size is None else (images.size, images.size)
    prepare = PretrainedInput(size=size, data_mean=images.mean, data_std=images.std, mean=(0.0,), std=(1.0,))
    # Maps are a hundred times larger than vectors, and their numbers lie around 0 and 1.
    return _Features(network, prepare, network.paths * images.channels, torch.float16, network.size)
