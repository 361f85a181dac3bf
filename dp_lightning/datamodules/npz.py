"""Images in one ``.npz`` file, in the layout of MedMNIST (Yang et al. 2023).

The file holds ``train_images`` and ``train_labels``, and optionally the same for ``val`` and ``test``. ``train_groups``
holds the person of each image, if a person has several images; likewise ``val_groups`` and ``test_groups``. Shapes are
read from the headers of the arrays, so that a run is planned without reading an image.
"""

import math
import os
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dp_lightning.datamodules.base import (
    LARGEST_SIDE,
    MOST_CLASSES,
    ImageDataModule,
    Split,
    checked_labels,
    require_whole,
)
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.datamodules.persons import PersonIds
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import checked_groups

SPLITS: tuple[Split, ...] = ("train", "val", "test")
# Most bytes of an id, 4 for each character: an array stores every id with the length of the longest one.
_LONGEST_ID = 1024


class Header(NamedTuple):
    """Shape and type of an array, read without reading the array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class NpzImages(ImageDataModule):
    """Square images in one ``.npz`` file.

    ``*_images`` are uint8 (N, H, W) or (N, H, W, C) with at most 4 channels, ``*_labels`` are integers (N,)
    or (N, 1). Several labels per image are refused, and so are arrays that this machine's memory cannot hold twice.
    ``*_groups``, integers or text (N,) or (N, 1), hold the person id of each image.

    Args:
        path: The ``.npz`` file.
        num_classes: Number of classes, at most 100,000. None is one more than the largest training label, which is then
            treated as public, and must be below the number of training images: the network gets an output for each
            class.
        flip: Mirror training images at random; set it to false if a mirrored image means something else.
    """

    def __init__(self, path: str, *, num_classes: int | None = None, flip: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_classes is not None:
            require_whole("num_classes", num_classes, at_least=1, at_most=MOST_CLASSES)
        self.path = Path(path)
        self.given_num_classes = num_classes
        self.flip = flip

    @cached_property
    def num_classes(self) -> int:
        if self.given_num_classes is not None:
            return self.given_num_classes
        labels = self._read("train_labels")
        if labels.size == 0 or labels.min() < 0:
            found = f"has label {labels.min()}" if labels.size else "is empty"
            raise DataError(f"train_labels {found}; classes are numbered from 0; correct it in {self.path}")
        count = int(labels.max()) + 1
        if count > min(self.num_available, MOST_CLASSES):
            raise DataError(
                f"{self.path}: train_labels has label {count - 1} among {self.num_available} images, and the network "
                "would get an output for each class up to it. Number the classes from 0, or set "
                "data.init_args.num_classes."
            )
        return count

    @property
    def in_channels(self) -> int:
        shape = self._headers["train_images"].shape
        return shape[3] if len(shape) == 4 else 1

    @property
    def image_size(self) -> int:
        return self._headers["train_images"].shape[1]

    @property
    def num_available(self) -> int:
        return self._headers["train_images"].shape[0]

    @property
    def own_splits(self) -> tuple[Split, ...]:
        return tuple(split for split in SPLITS if f"{split}_images" in self._headers)

    def check_files(self) -> None:
        _ = self._headers

    def read_split(self, split: Split) -> ArraySource:
        images = torch.from_numpy(self._read(f"{split}_images"))
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        labels = self._read(f"{split}_labels").reshape(-1).astype(np.int64)
        where = f"{self.path}: {split}_labels"
        return ArraySource(images, checked_labels(torch.from_numpy(labels), self.num_classes, where))

    def groups(self, split: Split) -> PersonIds | None:
        return self._groups.get(split)

    @cached_property
    def _groups(self) -> dict[Split, PersonIds]:
        told = [split for split in self.own_splits if f"{split}_groups" in self._headers]
        names: dict[Split, str] = {split: f"{split}_groups" for split in told}
        return {
            split: PersonIds(checked_groups(self._read(name).reshape(-1), f"{self.path}: {name}"))
            for split, name in names.items()
        }

    @cached_property
    def _headers(self) -> dict[str, Header]:
        """Headers of the arrays by name, checked against each other."""
        if not self.path.is_file():
            raise DataError(f"{self.path} is missing; set data.init_args.path to the .npz file")
        try:
            with zipfile.ZipFile(self.path) as archive:
                present = {name.removesuffix(".npy"): name for name in archive.namelist()}
                wanted = [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels", "groups")]
                headers = {key: _read_header(archive, present[key]) for key in wanted if key in present}
        except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
            raise self._damaged(error) from error
        self._check_memory(headers)
        for split in SPLITS:
            if split == "train" or f"{split}_images" in headers or f"{split}_labels" in headers:
                self._check_pair(headers, split, sorted(present)[:20])
            self._check_groups(headers, split)
        train = headers["train_images"].shape
        for split in SPLITS:
            shape = headers.get(f"{split}_images", headers["train_images"]).shape
            if shape[1:] != train[1:]:
                raise DataError(f"{self.path}: {split}_images are {shape[1:]}, but train_images are {train[1:]}")
        return headers

    def _check_pair(self, headers: dict[str, Header], split: Split, present: list[str]) -> None:
        for key in (f"{split}_images", f"{split}_labels"):
            if key not in headers:
                raise DataError(f"{self.path}: the array {key} is missing; the file has {', '.join(present)}")
        images, labels = headers[f"{split}_images"], headers[f"{split}_labels"]
        if images.dtype != np.uint8:
            raise DataError(f"{self.path}: {split}_images must be uint8, not {images.dtype}")
        if len(images.shape) not in (3, 4) or (len(images.shape) == 4 and not 1 <= images.shape[3] <= 4):
            raise DataError(
                f"{self.path}: {split}_images must have shape (N, H, W) or (N, H, W, C) with C of 1 to 4, "
                f"not {images.shape}"
            )
        if images.shape[1] != images.shape[2]:
            raise DataError(f"{self.path}: {split}_images must be square, not {images.shape[1]}x{images.shape[2]}")
        if images.shape[0] == 0:
            raise DataError(f"{self.path}: {split}_images holds no images")
        if not 1 <= images.shape[1] <= LARGEST_SIDE:
            raise DataError(
                f"{self.path}: {split}_images have {images.shape[1]} pixels a side; they must have 1 to {LARGEST_SIDE}"
            )
        if labels.dtype.kind not in "iu":
            raise DataError(f"{self.path}: {split}_labels must be integers, not {labels.dtype}")
        if len(labels.shape) == 2 and labels.shape[1] > 1:
            raise DataError(
                f"{self.path}: {split}_labels has {labels.shape[1]} labels per image; only one class "
                "per image is supported"
            )
        if len(labels.shape) not in (1, 2):
            raise DataError(f"{self.path}: {split}_labels must have shape (N,) or (N, 1), not {labels.shape}")
        if labels.shape[0] != images.shape[0]:
            raise DataError(
                f"{self.path}: {split}_images has {images.shape[0]} images, but {split}_labels has "
                f"{labels.shape[0]} labels"
            )

    def _check_groups(self, headers: dict[str, Header], split: Split) -> None:
        key = f"{split}_groups"
        if key not in headers:
            return
        groups, images = headers[key], headers.get(f"{split}_images")
        if images is None:
            raise DataError(f"{self.path}: {key} belongs to {split}_images, which are missing")
        if groups.dtype.kind not in "iuU":
            raise DataError(
                f"{self.path}: {key} must be integers or text, not {groups.dtype}, with an id for each image"
            )
        if groups.dtype.itemsize > _LONGEST_ID:
            raise DataError(f"{self.path}: {key} must have ids of at most {_LONGEST_ID // 4} characters")
        if groups.shape not in ((images.shape[0],), (images.shape[0], 1)):
            raise DataError(
                f"{self.path}: {key} must have one id for each of {images.shape[0]} images, not shape {groups.shape}"
            )

    def _read(self, key: str) -> np.ndarray:
        _ = self._headers
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays[key]
        except Exception as error:
            raise self._damaged(error) from error

    def _check_memory(self, headers: dict[str, Header]) -> None:
        """Refuse a file that does not fit into memory: its arrays are read whole, and copied once."""
        needed = 2 * sum(header.num_bytes for header in headers.values())
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise DataError(
                f"{self.path} needs {needed / 1e9:,.1f} GB of memory when it is read, but this machine has "
                f"{there / 1e9:,.1f} GB; save the images as files and use ImageFolder"
            )

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is not a complete .npz file ({error}); copy or download it again")


def _read_header(archive: zipfile.ZipFile, name: str) -> Header:
    """Shape and type of an array.

    Raises:
        ValueError: They do not match the size of the array's data in the archive.
    """
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        header, before = Header(shape, dtype), file.tell()
    held = archive.getinfo(name).file_size - before
    if not dtype.hasobject and (min(shape, default=0) < 0 or header.num_bytes != held):
        raise ValueError(f"{name} claims to have shape {shape} of {dtype}, but has {held:,} bytes")
    return header
