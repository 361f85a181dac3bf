"""Scattering coefficients of images as features for a private layer: normalised, centred and whitened.

A private gradient's noise is the same in all directions, so features serve it best where they differ between images:
what all images share uses up the length of a feature without telling any two apart. Mean and covariance of the maps are
taken from `random_images`, so nothing is estimated from the data, nor from other photographs.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.models.random_images import dead_leaves, spectra
from dp_lightning.models.scattering import Scattering

_SEED = 0
_IMAGES = 500  # number of images of each kind
# Relative to the largest variance: directions with less would be raised by more than tenfold, and carry noise.
_FLOOR = 0.01


class ScatteringFeatures(nn.Module):
    """Images (N, C, H, W) to maps (N, C K, h, w), float32, in three steps.

    With ``mirror``, each map is first averaged with the mirrored map of the mirrored wavelets. That is the map of the
    mirror image, but for its places, which begin at another edge and lie up to 2^J - 1 pixels aside. Then each group of
    C neighbouring maps of an image gets the mean 0 and the variance 1 (Tramèr and Boneh 2021, "Differentially private
    learning needs better features (or much more data)"). Last, the mean of random images is subtracted, and the C K
    maps are multiplied by (S / s + 0.01)^(-1/2), with S their covariance over random images and s its largest
    eigenvalue.

    Args:
        channels: C.
        scales: J of `Scattering`.
        angles: L of `Scattering`.
        mirror: Whether an image and its mirror image show the same, as with most photographs, but not with letters or a
            chest from the front.

    Raises:
        ModelError: There is no scale or no angle.
    """

    mean: Tensor
    whitening: Tensor
    _mirrored: Tensor | None

    def __init__(self, channels: int, *, scales: int = 2, angles: int = 8, mirror: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.scattering = Scattering(scales=scales, angles=angles)
        places = _mirrored_places(channels, scales, angles) if mirror else None
        self.register_buffer("_mirrored", places, persistent=False)
        if torch.get_default_device().type == "meta":  # it is built for its shapes
            count = self.channels * self.paths
            mean, whitening = torch.empty(count), torch.empty(count, count)
        else:
            mean, whitening = (known.clone() for known in _of_random_images(channels, scales, angles, mirror))
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)

    @property
    def paths(self) -> int:
        """K."""
        return self.scattering.paths

    def size(self, pixels: int) -> int:
        """Height or width of the maps of an image."""
        return self.scattering.size(pixels)

    def forward(self, images: Tensor) -> Tensor:
        maps = _normalized(self.scattering, self._mirrored, images)
        whitened = self.whitening @ (maps.flatten(2) - self.mean[:, None])
        return whitened.view_as(maps)


def _normalized(scattering: Scattering, mirrored: Tensor | None, images: Tensor) -> Tensor:
    """The maps (N, C K, h, w) before they are whitened, averaged with those at ``mirrored`` if it is given."""
    maps = scattering(images)
    if mirrored is not None:
        maps = (maps + maps.index_select(1, mirrored).flip(-1)) / 2
    return F.group_norm(maps, scattering.paths)


@functools.lru_cache(maxsize=4)
def _of_random_images(channels: int, scales: int, angles: int, mirror: bool) -> tuple[Tensor, Tensor]:
    """The mean (C K,) of the maps, and the square root of their inverse covariance (C K, C K)."""
    generator = torch.Generator().manual_seed(_SEED)
    size = 8 * 2**scales  # eight places each way
    kinds = [make(_IMAGES, channels=channels, size=size, generator=generator) for make in (dead_leaves, spectra)]
    scattering = Scattering(scales=scales, angles=angles)
    mirrored = _mirrored_places(channels, scales, angles) if mirror else None
    maps = _normalized(scattering, mirrored, torch.cat(kinds)).transpose(0, 1).flatten(1)
    mean = maps.mean(dim=1)
    centred = (maps - mean[:, None]).double()
    variances, directions = torch.linalg.eigh(centred @ centred.T / centred.shape[1])
    scale = (variances.clamp(min=0) / variances[-1] + _FLOOR).rsqrt()
    return mean, ((directions * scale) @ directions.T).float()


def _mirrored_places(channels: int, scales: int, angles: int) -> Tensor:
    """For each map in its order, the one that the mirror image has in its place."""
    turned = [-angle % angles for angle in range(angles)]
    paths = [0]
    for scale in range(scales):
        start = len(paths)
        paths += [start + angle for angle in turned]
        for _ in range(scale + 1, scales):
            start = len(paths)
            paths += [start + second * angles + first for second in turned for first in turned]
    return torch.tensor([channel * len(paths) + path for channel in range(channels) for path in paths])
