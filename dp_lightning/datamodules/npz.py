"""Images in one ``.npz`` file, in the layout of MedMNIST (Yang et al. 2023).

Shapes are read from the headers of the arrays, so that a run is planned without reading an image.
"""

import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.datamodules.decoding import Window, require_finite, require_levels, windowed
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import Group, checked_groups

SPLITS: tuple[Split, ...] = ("train", "val", "test")


class NpzImages(ImageDataModule):
    """Square images in one ``.npz`` file.

    It holds ``train_images`` and ``train_labels``, and optionally the same for ``val`` and ``test``. ``*_images`` are
    numbers (N, H, H) or (N, H, H, C) with at most 4 channels, ``*_labels`` are integers (N,) or (N, 1), or (N, L) of 0
    and 1 if an image may have several of L labels. ``*_groups``, integers or text (N,) or (N, 1), hold the person id of
    each image, if a person has several images. The whole file is read into memory.

    Args:
        path: The ``.npz`` file.
        num_classes: Number of classes. None is L, or one more than the largest training label, which is then treated
            as public.
        window: The values in the arrays that are black and white, such as ``[0, 4095]``, a public choice; what lies
            between them gets 256 levels. None is for uint8, and refuses other arrays.
        flip: Mirror training images at random; set it to false if a mirrored image means something else.
    """

    def __init__(
        self,
        path: str,
        *,
        num_classes: int | None = None,
        window: Window | None = None,
        flip: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = Path(path)
        self.given_num_classes = num_classes
        self.window, self.flip = window, flip

    @cached_property
    def num_classes(self) -> int:
        if self.multi_label:
            return self._headers["train_labels"].shape[1]
        if self.given_num_classes is not None:
            return self.given_num_classes
        return int(self._read("train_labels").max()) + 1

    @property
    def multi_label(self) -> bool:
        return (*self._headers["train_labels"].shape, 1)[1] > 1

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

    def read_split(self, split: Split) -> ArraySource:
        values = self.values(split)
        try:
            if self.window is not None:  # one by one, since its numbers take eight times the memory
                values = np.stack([windowed(image, self.window) for image in values])
                require_levels(self.window, int(values.min()), int(values.max()), f"{split}_images of {self.path}")
            images = torch.from_numpy(windowed(values, None))
        except ConfigurationError as error:
            raise DataError(f"{self.path}, {split}_images: {error}.") from error
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return ArraySource(images, self.labels(split))

    def values(self, split: Split) -> np.ndarray:
        """Return the images of a split as they are in the file: (N, H, H) or (N, H, H, C)."""
        images = self._read(f"{split}_images")
        require_finite(images, f"{self.path}, {split}_images")
        return images

    def labels(self, split: Split) -> torch.Tensor:
        """Return the labels of a split: int64 (N,), or float32 (N, L) if an image may have several.

        Raises:
            DataError: A label is none of ``num_classes``.
        """
        labels = torch.from_numpy(self._read(f"{split}_labels").astype(np.int64))
        labels, largest = (labels, 1) if self.multi_label else (labels.reshape(-1), self.num_classes - 1)
        if labels.min() < 0 or labels.max() > largest:
            several = "several labels per image" if self.multi_label else f"{self.num_classes} classes"
            raise DataError(
                f"{self.path}: {split}_labels are {labels.min()} to {labels.max()}, and must be 0 to {largest} with "
                f"{several}."
            )
        return labels.float() if self.multi_label else labels

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
    def _headers(self) -> dict[str, np.ndarray]:
        """Stand-ins for the arrays by name, checked against each other: their shapes and types, without numbers."""
        if not self.path.is_file():
            raise DataError(f"{self.path} is missing; set {self.settings}.path to the .npz file")
        wanted = [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels", "groups")]
        try:
            with zipfile.ZipFile(self.path) as archive:
                present = archive.namelist()
                headers = {key: _read_header(archive, f"{key}.npy") for key in wanted if f"{key}.npy" in present}
        except Exception as error:  # numpy and zipfile raise many kinds for a damaged file
            raise DataError(f"{self.path} is not a complete .npz file ({error}); copy or download it again") from error
        for split in SPLITS:
            is_there = split == "train" or any(name.startswith(split) for name in headers)
            if is_there and not _is_complete(headers, split):
                images = headers.get(f"{split}_images")
                empty = split == "train" and images is not None and images.shape[:1] == (0,)
                raise DataError(
                    f"{'The training set is empty: ' if empty else ''}{self.path} needs {split}_images, numbers "
                    f"(N, H, H) or (N, H, H, C) with C up to 4, in the size of train_images, and {split}_labels, "
                    f"integers (N,), (N, 1) or (N, L) as for training; {split}_groups, if there are any, are integers "
                    "or text (N,) or (N, 1). It has "
                    f"{', '.join(f'{name} {header.dtype} {header.shape}' for name, header in headers.items())}."
                )
        return headers

    def _read(self, key: str) -> np.ndarray:
        _ = self._headers
        with np.load(self.path, allow_pickle=False) as arrays:
            return arrays[key]


def _read_header(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        return np.broadcast_to(np.empty((), dtype), shape)


def _is_complete(headers: dict[str, np.ndarray], split: Split) -> bool:
    """Return whether the arrays of a split have the shapes and types that ``NpzImages`` reads."""
    images, labels, groups = (headers.get(f"{split}_{kind}") for kind in ("images", "labels", "groups"))
    if images is None or labels is None or len(images.shape) not in (3, 4):
        return False
    n, height, width, *channels = images.shape
    several = (*headers["train_labels"].shape, 1, 1)[1]
    return (
        images.dtype.kind in "uif"
        and height == width
        and channels in ([], [1], [2], [3], [4])
        and 0 not in images.shape
        and images.shape[1:] == headers["train_images"].shape[1:]
        and labels.dtype.kind in "iu"
        and labels.shape in ([(n,), (n, 1)] if several == 1 else [(n, several)])
        and (groups is None or (groups.dtype.kind in "iuU" and groups.shape in [(n,), (n, 1)]))
    )
