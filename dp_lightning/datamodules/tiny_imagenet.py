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
from dp_lightning.datamodules.folder import image_files
from dp_lightning.errors import DataError

# Most bytes of a list; that of the validation images has 262,000.


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
        return len(self.classes)

    @property
    def class_names(self) -> list[str]:
        return list(self.classes)

    @property
    def num_available(self) -> int:
        return len(self._train_files)

    @cached_property
    def classes(self) -> dict[str, int]:
        """Label of each wnid, in the order of ``wnids.txt``."""
        wnids = self._lines(self.root / "wnids.txt")
        if not wnids:
            raise DataError(f"{self.root / 'wnids.txt'} lists no classes")
        return {wnid: label for label, wnid in enumerate(wnids)}

    def check_files(self) -> None:
        _ = self._train_files, self._test_files

    def read_split(self, split: Split) -> FileSource:
        files = self._train_files if split == "train" else self._test_files
        labels = checked_labels([label for _, label in files], self.num_classes, str(self.root))
        return FileSource([path for path, _ in files], labels, size=self.image_size)

    @cached_property
    def _train_files(self) -> list[tuple[str, int]]:
        files = []
        for wnid, label in self.classes.items():
            folder = self.root / "train" / wnid / "images"
            if not folder.is_dir():
                raise self._missing(folder)
            found = image_files(folder, Counter())
            if not found:
                raise DataError(f"{folder} holds no image files; unpack the archive again")
            files += [(path, label) for path in found]
        return files

    @cached_property
    def _test_files(self) -> list[tuple[str, int]]:
        annotations = self.root / "val" / "val_annotations.txt"
        folder = self.root / "val" / "images"
        if not folder.is_dir():
            raise self._missing(folder)
        present = {os.path.basename(path) for path in image_files(folder, Counter())}
        files = []
        for number, line in enumerate(self._lines(annotations), start=1):
            name, wnid = (*line.split("\t"), "")[:2]
            if wnid not in self.classes:
                raise DataError(f"{annotations}, line {number}: {wnid!r} is not in wnids.txt")
            if name not in present:
                raise self._missing(folder / name)
            files.append((os.path.join(folder, name), self.classes[wnid]))
        return files

    def _lines(self, path: Path) -> list[str]:
        if not path.is_file():
            raise self._missing(path)
        return [line for line in path.read_text().splitlines() if line.strip()]

    def _missing(self, path: Path) -> DataError:
        return DataError(
            f"{path} is missing; unpack tiny-imagenet-200.zip and set data.init_args.root to the folder "
            "that holds wnids.txt"
        )
