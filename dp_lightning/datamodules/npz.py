"""Images in one ``.npz`` file, in the layout of MedMNIST (Yang et al. 2023).

The file holds ``train_images`` and ``train_labels``, and optionally the same for ``val`` and ``test``. ``train_groups``
tells the persons of the images, where there are several images of a person; ``val_groups`` and ``test_groups`` too.
Shapes are read from the headers of the arrays, so that a run is planned without reading an image.
"""

import zipfile
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dp_lightning.datamodules.base import ImageDataModule, Split, checked_labels
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.datamodules.persons import PersonIds
from dp_lightning.errors import DataError
from dp_lightning.privacy.groups import checked_groups

SPLITS: tuple[Split, ...] = ("train", "val", "test")
# Bytes of an id, 4 for each character: an array has as many for each image as for the longest one.
_LONGEST_ID = 1024
# What numpy and zipfile raise on a damaged file.
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class Header(NamedTuple):
    """Shape and type of an array, read without the array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class NpzImages(ImageDataModule):
    """Square images in one ``.npz`` file.

    ``*_images`` are uint8 (N, H, W) or (N, H, W, C) with at most 4 channels, ``*_labels`` are integers (N,)
    or (N, 1). Several labels per image are refused. ``*_groups``, integers or text (N,) or (N, 1), have the id of the
    person of each image.

    Args:
        path: The ``.npz`` file.
        num_classes: Number of classes. Without it, it is one more than the largest training label, which is
            then taken to be public.
        flip: Mirror training images at random; set it to false where a mirrored image is another thing.
    """

    def __init__(self, path: str, *, num_classes: int | None = None, flip: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
            raise DataError(f"train_labels {found}; classes are numbered from 0: correct it in {self.path}")
        return int(labels.max()) + 1

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
        assert self._headers

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
        headers: dict[str, Header] = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for member in archive.namelist():
                    with archive.open(member) as file:
                        headers[member.removesuffix(".npy")] = _read_header(file)
        except READ_ERRORS as error:
            raise self._damaged(error) from error
        for split in SPLITS:
            if split == "train" or f"{split}_images" in headers or f"{split}_labels" in headers:
                self._check_pair(headers, split)
            self._check_groups(headers, split)
        train = headers["train_images"].shape
        for split in SPLITS:
            shape = headers.get(f"{split}_images", headers["train_images"]).shape
            if shape[1:] != train[1:]:
                raise DataError(f"{self.path}: {split}_images are {shape[1:]}, but train_images are {train[1:]}")
        return headers

    def _check_pair(self, headers: dict[str, Header], split: Split) -> None:
        for key in (f"{split}_images", f"{split}_labels"):
            if key not in headers:
                raise DataError(f"{self.path}: the array {key} is missing; the file has {', '.join(sorted(headers))}")
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
            raise DataError(f"{self.path}: {key} has no {split}_images beside it")
        if groups.dtype.kind not in "iuU":
            raise DataError(
                f"{self.path}: {key} must be integers or text, not {groups.dtype}; ids that are missing too"
            )
        if groups.dtype.itemsize > _LONGEST_ID:
            raise DataError(f"{self.path}: {key} must have ids of at most {_LONGEST_ID // 4} characters")
        if groups.shape not in ((images.shape[0],), (images.shape[0], 1)):
            raise DataError(
                f"{self.path}: {key} must have one id for each of {images.shape[0]} images, not shape {groups.shape}"
            )

    def _read(self, key: str) -> np.ndarray:
        assert self._headers
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays[key]
        except READ_ERRORS as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is no complete .npz file ({error}); copy or download it again")


def _read_header(file: Any) -> Header:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return Header(shape, dtype)
