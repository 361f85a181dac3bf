"""Images in one ``.npz`` file, in the layout of MedMNIST (Yang et al. 2023).

The file holds ``train_images`` and ``train_labels``, and optionally the same for ``val`` and ``test``. ``train_groups``
holds the person of each image, if a person has several images; likewise ``val_groups`` and ``test_groups``. Shapes are
read from the headers of the arrays, so that a run is planned without reading an image.
"""

import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dp_lightning.datamodules.base import ImageDataModule, Split, checked_labels, require_whole
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group, checked_groups

SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Header(NamedTuple):
    """Shape and type of an array, read without reading the array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class NpzImages(ImageDataModule):
    """Square images in one ``.npz`` file.

    ``*_images`` are uint8 (N, H, W) or (N, H, W, C) with at most 4 channels, ``*_labels`` are integers (N,) or (N, 1).
    Several labels per image are refused. ``*_groups``, integers or text (N,) or (N, 1), hold the person id of each
    image. The whole file is read into memory.

    Args:
        path: The ``.npz`` file.
        num_classes: Number of classes. None is one more than the largest training label, which is then treated as
            public, and must be below the number of training images: the network gets an output for each class.
        flip: Mirror training images at random; set it to false if a mirrored image means something else.
    """

    def __init__(self, path: str, *, num_classes: int | None = None, flip: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_classes is not None:
            require_whole("num_classes", num_classes, at_least=1)
        self.path = Path(path)
        self.given_num_classes = num_classes
        self.flip = flip

    @cached_property
    def num_classes(self) -> int:
        if self.given_num_classes is not None:
            return self.given_num_classes
        labels = self._read("train_labels")
        if labels.min() < 0:
            raise DataError(
                f"train_labels has label {labels.min()}; classes are numbered from 0; correct it in {self.path}"
            )
        count = int(labels.max()) + 1
        if count > self.num_available:
            raise DataError(
                f"{self.path}: train_labels has label {count - 1} among {self.num_available} images, and the network "
                f"would get an output for each class up to it. Number the classes from 0, or set {self.settings}."
                "num_classes."
            )
        return count

    @property
    def in_channels(self) -> int:
        return (*self._headers["train_images"].shape, 1)[3]

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
        labels = torch.from_numpy(self._read(f"{split}_labels").reshape(-1).astype(np.int64))
        return ArraySource(images, checked_labels(labels, self.num_classes, f"{self.path}: {split}_labels"))

    def groups(self, split: Split) -> list[Group] | None:
        return self._groups.get(split)

    @cached_property
    def _groups(self) -> dict[Split, list[Group]]:
        """The person of each image by split, where the file has one."""
        names: dict[Split, str] = {split: f"{split}_groups" for split in SPLITS if f"{split}_groups" in self._headers}
        return {
            split: checked_groups(self._read(name).reshape(-1), f"{self.path}: {name}") for split, name in names.items()
        }

    @cached_property
    def _headers(self) -> dict[str, Header]:
        """Headers of the arrays by name, checked against each other."""
        if not self.path.is_file():
            raise DataError(f"{self.path} is missing; set {self.settings}.path to the .npz file")
        wanted = [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels", "groups")]
        try:
            with zipfile.ZipFile(self.path) as archive:
                present = {name.removesuffix(".npy"): name for name in archive.namelist()}
                headers = {key: _read_header(archive, present[key]) for key in wanted if key in present}
        except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
            raise self._damaged(error) from error
        for split in SPLITS:
            if split == "train" or any(name.startswith(split) for name in headers):
                for kind in ("images", "labels"):
                    if f"{split}_{kind}" not in headers:
                        raise DataError(
                            f"{self.path}: the array {split}_{kind} is missing; the file has {', '.join(present)}"
                        )
                if problem := _problem_of(headers, split):
                    raise DataError(f"{self.path}: {problem}")
        return headers

    def _read(self, key: str) -> np.ndarray:
        _ = self._headers
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return arrays[key]
        except Exception as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is not a complete .npz file ({error}); copy or download it again")


def _read_header(archive: zipfile.ZipFile, name: str) -> Header:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        return Header(shape, dtype)


def _problem_of(headers: dict[str, Header], split: Split) -> str | None:
    """Return what is wrong with the shapes and types of a split; None if nothing is."""
    (shape, dtype), labels = headers[f"{split}_images"], headers[f"{split}_labels"]
    groups = headers.get(f"{split}_groups")
    if dtype != np.uint8:
        return f"{split}_images must be uint8, not {dtype}"
    if len(shape) not in (3, 4) or (len(shape) == 4 and not 1 <= shape[3] <= 4):
        return f"{split}_images must have shape (N, H, W) or (N, H, W, C) with C of 1 to 4, not {shape}"
    if shape[1] != shape[2]:
        return f"{split}_images must be square, not {shape[1]}x{shape[2]}"
    if 0 in shape:
        return f"{split}_images holds no images"
    if shape[1:] != headers["train_images"].shape[1:]:
        return f"{split}_images are {shape[1:]}, but train_images are {headers['train_images'].shape[1:]}"
    if labels.dtype.kind not in "iu":
        return f"{split}_labels must be integers, not {labels.dtype}"
    if len(labels.shape) == 2 and labels.shape[1] > 1:
        return f"{split}_labels has {labels.shape[1]} labels per image; only one class per image is supported"
    if labels.shape not in ((shape[0],), (shape[0], 1)):
        return f"{split}_labels must have one label for each of {shape[0]} images, not shape {labels.shape}"
    if groups is not None and groups.dtype.kind not in "iuU":
        return f"{split}_groups must be integers or text, not {groups.dtype}, with an id for each image"
    if groups is not None and groups.shape not in ((shape[0],), (shape[0], 1)):
        return f"{split}_groups must have one id for each of {shape[0]} images, not shape {groups.shape}"
    return None
