"""What the owner of a data set wants to know before a run.

Every number here is computed from private images without noise, and is for their owner. N, the names of the classes and
what becomes a setting of a run are public once the run is released.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.decoding import read_pixels
from dp_lightning.datamodules.file_source import FileSource, each_file
from dp_lightning.datamodules.npz import NpzImages
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group


@dataclass(frozen=True)
class Look:
    """One image as it was found.

    Attributes:
        split: The part of the data that the image is in.
        labels: The number of its class, or of each of its labels.
        person: The id of its person; None if the data does not identify persons.
        path: Its file; None for an image in an array.
        problem: Why the image cannot be read; None if it can, and only then the attributes below are known.
        side: Length of the shorter side in pixels.
        channels: Number of channels of an array; of a file 1 for grey, 3 for colour.
        values: Its lowest and highest value, if it has more than 8 bits.
        digest: Digest of the pixels, equal for equal images.
    """

    split: Split
    labels: tuple[int, ...]
    person: Group | None
    path: str | None = None
    problem: str | None = None
    side: int = 0
    channels: int = 0
    values: tuple[float, float] | None = None
    digest: bytes = b""


@dataclass(frozen=True)
class Survey:
    """What was found in a data set.

    Attributes:
        looks: A look at every image, in the order of the splits.
        splits: The splits that the data has.
        class_names: Names of the classes in the order of their labels, or of the labels that an image may have.
    """

    looks: list[Look]
    splits: tuple[Split, ...]
    class_names: list[str]

    @classmethod
    def of(cls, data: ImageDataModule) -> "Survey":
        """Read every image of the data.

        Raises:
            DataError: The layout is not that of the data module, or no image of the training set can be read.
        """
        looks: list[Look] = []
        for split in data.own_splits:
            found: Iterable[dict[str, Any]]
            if isinstance(data, NpzImages):
                marked, found = data.labels(split), map(_in_array, data.values(split))
            else:
                source = data.read_split(split)
                assert isinstance(source, FileSource)
                marked, found = source.labels, each_file(_in_file, source.paths, f"the {split} images")
            rows = marked if data.multi_label else marked.unsqueeze(1)
            labels = [tuple((row.nonzero().flatten() if data.multi_label else row).tolist()) for row in rows]
            persons: Sequence[Group | None] = data.groups(split) or [None] * len(labels)
            looks += [
                Look(split, label, person, **facts) for label, person, facts in zip(labels, persons, found, strict=True)
            ]
        survey = cls(looks, data.own_splits, data.label_names)
        if not survey.readable:
            raise DataError(f"None of the training images can be read. {looks[0].path}: {looks[0].problem}")
        return survey

    @cached_property
    def readable(self) -> list[Look]:
        """The training images that can be read."""
        return [look for look in self.looks if look.split == "train" and look.problem is None]

    @cached_property
    def images_of_persons(self) -> Counter[Group] | None:
        """How many training images each person has that can be read; None if the data does not identify persons."""
        return Counter(look.person for look in self.readable if look.person is not None) or None

    def counts(self, split: Split) -> list[int]:
        """Return the number of images of each class that can be read, and then that of all images."""
        found = [look.labels for look in self.looks if look.split == split and look.problem is None]
        counted = Counter(label for labels in found for label in labels)
        return [*(counted[label] for label in range(len(self.class_names))), len(found)]

    @property
    def median_side(self) -> int:
        """Median of the shorter sides of the training images, in pixels."""
        return int(median(look.side for look in self.readable))

    @cached_property
    def values(self) -> tuple[float, float] | None:
        """Lowest and highest value of the training images of more than 8 bits; None if there are none."""
        found = [look.values for look in self.readable if look.values is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None

    @property
    def is_grey(self) -> bool:
        """Whether no training image has colours."""
        return all(look.channels < 3 for look in self.readable)


def _in_file(path: str) -> dict[str, Any]:
    """Read one file and return the attributes of its ``Look``."""
    try:
        values, _ = read_pixels(path)
    except ValueError as error:
        return {"path": path, "problem": str(error)}
    return {"path": path, **_in_array(values)}


def _in_array(image: np.ndarray) -> dict[str, Any]:
    """Return the attributes of the ``Look`` of one image (H, W) or (H, W, C)."""
    height, width, channels = (*image.shape, 1)[:3]
    values = None if image.dtype == np.uint8 else (float(image.min()), float(image.max()))
    digest = hashlib.sha256(image.tobytes()).digest()
    return {"side": min(height, width), "channels": channels, "values": values, "digest": digest}
