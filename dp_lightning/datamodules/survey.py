"""What the owner of a data set wants to know before a run.

Every number here is computed from private images without noise, and is for their owner. N, the names of the classes and
what becomes a setting of a run are public once the run is released.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ArraySource, ImageSource
from dp_lightning.datamodules.file_source import FileSource, each_file, open_image
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group


@dataclass(frozen=True)
class Look:
    """One image as it was found.

    Attributes:
        problem: Why the image cannot be read; None if it can, and only then the other attributes are known.
        side: Length of the shorter side in pixels.
        channels: Number of channels of an array; of a file 1 for grey, 3 for colour.
        digest: Digest of the file or of the pixels, equal for equal images.
    """

    problem: str | None = None
    side: int = 0
    channels: int = 0
    digest: bytes = b""


@dataclass(frozen=True)
class Survey:
    """What was found in a data set.

    Attributes:
        looks: A look at every image, by split.
        labels: The class of each image, likewise.
        class_names: Names of the classes in the order of their labels.
        files: The path of each image, by split; empty for images in an array.
        persons: The person of each training image; None if the data does not identify persons.
    """

    looks: dict[Split, list[Look]]
    labels: dict[Split, list[int]]
    class_names: list[str]
    files: dict[Split, Sequence[str]]
    persons: Sequence[Group] | None

    @classmethod
    def of(cls, data: ImageDataModule) -> "Survey":
        """Read every image of the data.

        Raises:
            DataError: The layout is not that of the data module, or no image of the training set can be read.
        """
        sources = {split: data.read_split(split) for split in data.own_splits}
        looks = {split: _looks_at(source, f"the {split} images") for split, source in sources.items()}
        if all(look.problem for look in looks["train"]):
            raise DataError(
                f"None of the {len(looks['train']):,} training images can be read: {looks['train'][0].problem}"
            )
        return cls(
            looks,
            labels={split: source.labels.tolist() for split, source in sources.items()},
            class_names=data.class_names or [str(label) for label in range(data.num_classes)],
            files={split: source.paths for split, source in sources.items() if isinstance(source, FileSource)},
            persons=data.groups("train"),
        )

    @property
    def bad(self) -> list[tuple[str, str]]:
        """The files that cannot be read, with the reasons."""
        return [
            (path, look.problem)
            for split, paths in self.files.items()
            for path, look in zip(paths, self.looks[split], strict=True)
            if look.problem is not None
        ]

    @cached_property
    def readable(self) -> list[Look]:
        """The training images that can be read."""
        return [look for look in self.looks["train"] if look.problem is None]

    @cached_property
    def images_of_persons(self) -> Counter[Group] | None:
        """How many training images each person has that can be read; None if the data does not identify persons."""
        return None if self.persons is None else self._counted(self.persons, "train")

    def counts(self, split: Split) -> list[int]:
        """Return the number of images of each class that can be read."""
        found = self._counted(self.labels[split], split)
        return [found[label] for label in range(len(self.class_names))]

    def _counted(self, values: Sequence[Any], split: Split) -> Counter[Any]:
        pairs = zip(values, self.looks[split], strict=True)
        return Counter(value for value, look in pairs if look.problem is None)

    @property
    def median_side(self) -> int:
        """Median of the shorter sides of the training images, in pixels."""
        return int(median(look.side for look in self.readable))

    @property
    def is_grey(self) -> bool:
        """Whether no training image has colours."""
        return all(look.channels < 3 for look in self.readable)

    @cached_property
    def repeats(self) -> list[tuple[int, int]]:
        """The places of training images that are equal to an earlier one, each after the place of the earlier one."""
        first: dict[bytes, int] = {}
        looks = [(place, look) for place, look in enumerate(self.looks["train"]) if look.problem is None]
        pairs = [(first.setdefault(look.digest, place), place) for place, look in looks]
        return [(earlier, later) for earlier, later in pairs if earlier != later]

    @cached_property
    def shared(self) -> list[tuple[Split, int]]:
        """Split and place of each validation or test image that is also in the training set."""
        trained = {look.digest for look in self.readable}
        return [
            (split, place)
            for split, looks in self.looks.items()
            if split != "train"
            for place, look in enumerate(looks)
            if look.problem is None and look.digest in trained
        ]


def _look_at(path: str) -> Look:
    """Read one file, whose digest is that of its bytes."""
    try:
        open_image(path)
    except ValueError as error:
        return Look(str(error))
    with Image.open(path) as image:  # its header
        side, is_grey = min(image.size), image.mode.startswith(("1", "L", "I"))
    return Look(None, side, 1 if is_grey else 3, hashlib.sha256(Path(path).read_bytes()).digest())


def _looks_at(source: ImageSource, what: str) -> list[Look]:
    """Look at every image of a source; a bar on a terminal says ``what`` is read."""
    if isinstance(source, FileSource):
        return list(each_file(_look_at, source.paths, what))
    assert isinstance(source, ArraySource)
    channels, side = source.images.shape[1:3]
    digests = (hashlib.sha256(image.numpy().tobytes()).digest() for image in source.images)
    return [Look(None, side, channels, digest) for digest in digests]
