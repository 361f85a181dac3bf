"""Tiny ImageNet (Le and Yang 2015): 200 classes of 64x64 pixels, in the folder layout of its archive.

wnids.txt                       one class per line
train/<wnid>/images/*.JPEG
val/images/*.JPEG
val/val_annotations.txt         file name, tab, wnid, tab, a box
"""

import os
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

from dp_lightning.datamodules.base import Split
from dp_lightning.datamodules.folder import ImageFolder
from dp_lightning.datamodules.listing import image_files
from dp_lightning.errors import DataError


class TinyImageNet(ImageFolder):
    """Tiny ImageNet: 100,000 training images; the 10,000 official validation images are the test set.

    The official test images have no labels and are not used. Normalisation uses the published constants of ImageNet.

    Args:
        root: The unpacked folder that holds ``wnids.txt``.
        mean: Mean of each channel on the scale 0 to 1: the published constant.
        std: Standard deviation of each channel on the same scale: the published constant.
    """

    split_names = ("train", "val")

    def __init__(
        self,
        root: str = "data/tiny-imagenet-200",
        *,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        **kwargs: Any,
    ) -> None:
        super().__init__(root, mean=mean, std=std, **kwargs)

    @cached_property
    def class_names(self) -> list[str]:
        """The wnids in the order of ``wnids.txt``."""
        return self._lines(self.root / "wnids.txt")

    def _listed(self, split: Split, folder: Path, left_out: Counter[str]) -> tuple[list[str], list[int]]:
        labels = {wnid: label for label, wnid in enumerate(self.class_names)}
        if split == "train":
            of_class = {label: image_files(folder / wnid / "images", left_out) for wnid, label in labels.items()}
            pairs = [(path, label) for label, paths in of_class.items() for path in paths]
        else:
            pairs, present = [], set(image_files(folder / "images", left_out))
            for number, line in enumerate(self._lines(folder / "val_annotations.txt"), start=1):
                name, wnid = (*line.split("\t"), "")[:2]
                path = os.path.join(folder / "images", name)
                if wnid not in labels or path not in present:
                    raise DataError(
                        f"{folder / 'val_annotations.txt'}, line {number}: {path} is missing, or {wnid!r} is not in "
                        "wnids.txt; unpack tiny-imagenet-200.zip again"
                    )
                pairs.append((path, labels[wnid]))
        return [path for path, _ in pairs], [label for _, label in pairs]

    def _lines(self, path: Path) -> list[str]:
        if not path.is_file():
            raise DataError(
                f"{path} is missing; unpack tiny-imagenet-200.zip and set {self.settings}.root to the folder that "
                "holds wnids.txt"
            )
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
