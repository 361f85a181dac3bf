"""Images and labels as one ``Dataset``, from memory or from files; what can be done per batch is done per batch.

Consecutive equal indices ask for several views of one image (augmentation multiplicity): its file is decoded once for
all of them.
"""

import copy
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

    def read(self, indices: Sequence[int], transform: Transform | None) -> Tensor:
        """The images at ``indices`` after ``transform`` on each: uint8 (n, C, H, W)."""

    def digest(self, indices: Tensor) -> bytes:
        """A digest that almost certainly changes if one of the images at ``indices`` (int64 (n,)) changes."""


class ArraySource:
    """Images held in memory: uint8 (N, C, H, W), labels int64 (N,)."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def read(self, indices: Sequence[int], transform: Transform | None) -> Tensor:
        images = self.images[torch.as_tensor(indices)]
        return images if transform is None else torch.stack([transform(image) for image in images])

    def digest(self, indices: Tensor) -> bytes:
        """A digest of the pixels."""
        found = hashlib.sha256()
        for piece in indices.split(1024):
            found.update(self.images[piece].numpy().tobytes())
        return found.digest()


class Sources(Dataset[ImageSource]):
    """The sources of a data module by the names of their splits.

    As an attribute that is a data set, it is no state of the module: a loss cannot use it, and nobody compares
    gigabytes of images before and after.
    """

    def __init__(self) -> None:
        self._sources: dict[str, ImageSource] = {}

    def __contains__(self, split: str) -> bool:
        return split in self._sources

    def __getitem__(self, split: str) -> ImageSource:
        return self._sources[split]

    def __setitem__(self, split: str, source: ImageSource) -> None:
        self._sources[split] = source


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Part of a source: item i is (float image (C, H, W), label) of the source's image ``indices[i]``.

    Args:
        source: Where images and labels come from.
        indices: int64 (n,), the part of the source that belongs to this data set.
        transform: Applied to each image separately: a uint8 tensor (C, H, W).
        normalize: Applied to a uint8 batch (n, C, H, W); returns float32. None leaves the images as bytes.
        augment: Applied to a uint8 batch (n, C, H, W) before ``normalize``; draws separately for each image.
        random: Whether ``transform`` is random, so that it must be applied again for each view of an image.
        groups: The person id of each image of this part, in order; None if the data does not identify persons.
    """

    def __init__(
        self,
        source: ImageSource,
        indices: Tensor,
        transform: Transform | None,
        normalize: Transform | None,
        *,
        augment: Transform | None = None,
        random: bool = False,
        groups: Iterable[Group] | None = None,
    ) -> None:
        self.source, self.indices = source, indices
        self.transform, self.normalize, self.augment, self.random = transform, normalize, augment, random
        self.groups = groups

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def image_files(self) -> list[str] | None:
        """The files of the images, in order; None if the images are not read from files."""
        names = getattr(self.source, "paths", None)
        return None if names is None else [names[index] for index in self.indices.tolist()]

    def as_bytes(self) -> "ImageDataset":
        """The same images without the normalisation: a quarter of the memory between processes and devices."""
        raw = copy.copy(self)
        raw.normalize = None
        return raw

    @property
    def labels(self) -> Tensor:
        """The labels of this part in order: int64 (n,)."""
        return self.source.labels[self.indices]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Called by ``DataLoader`` for a whole batch: (image, label) pairs; an empty list for no indices."""
        if len(indices) == 0:
            return []
        chosen = self.indices[torch.as_tensor(indices)]
        if self.random:
            images = self.source.read(chosen.tolist(), self.transform)
        else:
            different, place = chosen.unique_consecutive(return_inverse=True)
            images = self.source.read(different.tolist(), self.transform)[place]
        images = images if self.augment is None else self.augment(images)
        images = images if self.normalize is None else self.normalize(images)
        return list(zip(images, self.source.labels[chosen].tolist(), strict=True))
