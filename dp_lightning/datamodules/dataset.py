"""Images and labels as one ``Dataset``, from memory or from files."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dp_lightning.privacy.person_ids import Group

Transform = Callable[..., Tensor]


class ImageSource(Protocol):
    """Labelled images that can be read by index."""

    labels: Tensor

    def read(self, index: int) -> Tensor:
        """Return one image: uint8 (C, H, W)."""

    def digest(self, indices: Tensor) -> bytes:
        """Return a digest that almost certainly changes if one of the images at ``indices`` (int64 (n,)) changes."""


class ArraySource:
    """Images held in memory: uint8 (N, C, H, W), labels int64 (N,) or float32 (N, L)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def read(self, index: int) -> Tensor:
        return self.images[index]

    def digest(self, indices: Tensor) -> bytes:
        """Return a digest of the pixels."""
        found = hashlib.sha256()
        for piece in indices.split(1024):
            found.update(self.images[piece].numpy().tobytes())
        return found.digest()


def normalized(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (x / 255 - mean) / std of uint8 (n, C, H, W), float32 on the device of the images.

    Args:
        mean: Mean of each channel on the scale 0 to 1, or one number for all channels; a public constant.
        std: Standard deviation of each channel, likewise; above 0.
    """
    means, deviations = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    scale, shift = (
        _on(images.device, constants.float()) for constants in (1 / (255 * deviations), -means / deviations)
    )
    return images.to(torch.float32).mul_(scale).add_(shift)


def _on(device: torch.device, constants: Tensor) -> Tensor:
    """Return a few numbers on a device. A GPU waits for a copy, not for the arguments that a kernel is started with."""
    if device == constants.device:
        return constants
    return torch.stack([torch.full((), c, device=device) for c in constants.flatten().tolist()]).view(constants.shape)


class ImageDataset(Dataset[tuple[Tensor, int | Tensor]]):
    """Part of a source: item i is (uint8 image (C, H, W), label) of the source's image ``indices[i]``.

    A label is a number, or float32 (L,) of 0 and 1 if an image may have several of L labels.

    Args:
        source: Where images and labels come from.
        indices: int64 (n,), the part of the source that belongs to this data set.
        transform: Applied to each image: a uint8 tensor (C, H, W).
        groups: The person id of each image of this part, in order; None if the data does not identify persons.
    """

    def __init__(
        self,
        source: ImageSource,
        indices: Tensor,
        transform: Transform | None,
        groups: Iterable[Group] | None = None,
    ) -> None:
        self.source, self.indices, self.transform, self.groups = source, indices, transform, groups
        # The same numbers for NumPy, which reads one of them in a tenth of the time that torch takes.
        self._places, self._labels = indices.numpy(), source.labels.numpy()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def image_files(self) -> list[str] | None:
        """The files of the images, in order; None if the images are not read from files."""
        names = getattr(self.source, "paths", None)
        return None if names is None else [names[index] for index in self.indices.tolist()]

    @property
    def labels(self) -> Tensor:
        """The labels of this part in order: int64 (n,), or float32 (n, L)."""
        return self.source.labels[self.indices]

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        place = int(self._places[index])
        image, label = self.source.read(place), self._labels[place]
        label = int(label) if label.ndim == 0 else self.source.labels[place]
        return image if self.transform is None else self.transform(image), label
