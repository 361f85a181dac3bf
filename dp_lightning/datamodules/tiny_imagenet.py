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

from dp_lightning.datamodules.base import ImageDataModule, Split, checked_labels
from dp_lightning.datamodules.file_source import FileSource
from dp_lightning.datamodules.listing import image_files
from dp_lightning.errors import DataError


class TinyImageNet(ImageDataModule):
    """Tiny ImageNet: 100,000 training images; the 10,000 official validation images are the test set.

    The official test images have no labels and are not used. Normalisation uses the published constants of ImageNet.

    Args:
        root: The unpacked folder that holds ``wnids.txt``.
    """

    in_channels = 3
    image_size = 64

    def __init__(self, root: str = "data/tiny-imagenet-200", **kwargs: Any) -> None:
        super().__init__(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), **kwargs)
        self.root = Path(root)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """The wnids in the order of ``wnids.txt``."""
        return self._lines("wnids.txt")

    @property
    def num_available(self) -> int:
        return len(self._files["train"])

    def check_files(self) -> None:
        _ = self._files

    def read_split(self, split: Split) -> FileSource:
        paths, labels = zip(*self._files[split], strict=True)
        return FileSource(paths, checked_labels(labels, self.num_classes, str(self.root)), size=self.image_size)

    @cached_property
    def _files(self) -> dict[Split, list[tuple[str, int]]]:
        """Path and label of each image by split."""
        labels = {wnid: label for label, wnid in enumerate(self.class_names)}
        train = [
            (path, label)
            for wnid, label in labels.items()
            for path in self._images(self.root / "train" / wnid / "images")
        ]
        present, test = set(self._images(self.root / "val" / "images")), []
        for number, line in enumerate(self._lines("val/val_annotations.txt"), start=1):
            name, wnid = (*line.split("\t"), "")[:2]
            path = os.path.join(self.root / "val" / "images", name)
            if wnid not in labels:
                raise DataError(
                    f"{self.root / 'val' / 'val_annotations.txt'}, line {number}: {wnid!r} is not in wnids.txt"
                )
            if path not in present:
                raise self._missing(path)
            test.append((path, labels[wnid]))
        return {"train": train, "test": test}

    def _images(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            raise self._missing(folder)
        return image_files(folder, Counter())

    def _lines(self, name: str) -> list[str]:
        if not (self.root / name).is_file():
            raise self._missing(self.root / name)
        return [line for line in (self.root / name).read_text(encoding="utf-8").splitlines() if line.strip()]

    def _missing(self, path: Path | str) -> DataError:
        return DataError(
            f"{path} is missing; unpack tiny-imagenet-200.zip and set {self.settings}.root to the folder "
            "that holds wnids.txt"
        )
