"""What the owner of a data set wants to know before a run; every image is read once.

Every number here is computed from private images without noise, and is for their owner. N, the names of the classes and
what becomes a setting of a run are public once the run is released.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from PIL import Image

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.datamodules.file_source import FileSource
from dp_lightning.datamodules.reading_first import each_file, problem_of
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group

_CHANNELS = {1: "grey", 2: "grey with alpha", 3: "colour", 4: "colour with alpha"}
# PIL's modes that are not named after their channels.
_OF_MODE = {"1": 1, "P": 3, "CMYK": 3, "YCbCr": 3}


@dataclass(frozen=True)
class Look:
    """One image as it was found.

    Attributes:
        problem: why it cannot be read; None if it can, and only then the others are known.
        width, height: in pixels.
        channels: 1 for grey to 4 for colour with alpha.
        digest: equal for equal files, or pixels.
    """

    problem: str | None = None
    width: int = 0
    height: int = 0
    channels: int = 0
    digest: bytes = b""


@dataclass(frozen=True)
class Survey:
    """What was found in a data set.

    Attributes:
        looks: at every image, by split.
        labels: the class of each image, likewise.
        class_names: in the order of the labels.
        files: the path of each image; empty for images in an array.
        persons: the person of each training image; None if the data does not identify persons.
    """

    looks: dict[Split, list[Look]]
    labels: dict[Split, list[int]]
    class_names: list[str]
    files: dict[Split, Sequence[str]] = field(default_factory=dict)
    persons: Sequence[Group] | None = None

    @classmethod
    def of(cls, data: ImageDataModule) -> "Survey":
        """Read every image of the data.

        Raises:
            DataError: The layout is not that of the data module, or no image of the training set can be read.
        """
        looks: dict[Split, list[Look]] = {}
        labels: dict[Split, list[int]] = {}
        files: dict[Split, Sequence[str]] = {}
        for split in data.own_splits:
            source = data.read_split(split)
            labels[split] = source.labels.tolist()
            if isinstance(source, FileSource):
                files[split] = list(source.paths)
                looks[split] = list(each_file(look_at, source.paths, f"the {split} images"))
            else:
                assert isinstance(source, ArraySource)
                looks[split] = _looks_at_arrays(source)
        names = data.class_names or [str(label) for label in range(data.num_classes)]
        groups = data.groups("train")
        found = cls(looks, labels, names, files, None if groups is None else list(groups))
        if not found.readable:
            raise DataError(
                f"None of the {len(looks['train']):,} training images can be read: {looks['train'][0].problem}"
            )
        return found

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
        return self._readable("train")

    @cached_property
    def images_of_persons(self) -> Counter[Group] | None:
        """How many training images each person has that can be read; None if the data does not identify persons."""
        if self.persons is None:
            return None
        return Counter(
            person for person, look in zip(self.persons, self.looks["train"], strict=True) if look.problem is None
        )

    def counts(self, split: Split) -> list[int]:
        """Images of each class that can be read."""
        found = Counter(
            label for label, look in zip(self.labels[split], self.looks[split], strict=True) if look.problem is None
        )
        return [found[label] for label in range(len(self.class_names))]

    @property
    def median_side(self) -> int:
        """Median of the shorter sides of the training images, in pixels."""
        return int(median(min(look.width, look.height) for look in self.readable))

    @property
    def is_grey(self) -> bool:
        """Whether no training image has colours."""
        return all(look.channels < 3 for look in self.readable)

    @property
    def kinds(self) -> dict[str, int]:
        """How many training images are grey, in colour and so on."""
        return dict(Counter(_CHANNELS[look.channels] for look in self.readable).most_common())

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

    def _readable(self, split: Split) -> list[Look]:
        return [look for look in self.looks[split] if look.problem is None]


def look_at(path: str) -> Look:
    """Read one file."""
    if problem := problem_of(path):
        return Look(problem)
    with Image.open(path) as image:  # its header
        (width, height), mode = image.size, image.mode
    channels = _OF_MODE.get(mode, 1 if mode.startswith("I") else len(mode))
    return Look(None, width, height, channels, hashlib.sha256(Path(path).read_bytes()).digest())


def _looks_at_arrays(source: ArraySource) -> list[Look]:
    _, channels, height, width = source.images.shape
    pixels: Iterable[bytes] = (image.numpy().tobytes() for image in source.images)
    return [Look(None, width, height, channels, hashlib.sha256(each).digest()) for each in pixels]


def spread(values: Sequence[int]) -> str:
    """The median of some numbers and their range, in words."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}, median {median(values):g}"
