"""Images in a tree of class folders.

    root/train/<class>/*
    root/val/<class>/*      or root/test, or both; "valid", "Testing" and the like are understood
    root/train/<class>/<person>/*, if each person has a folder

Counts come from file names; an image is opened when a batch needs it.

Tiny ImageNet has the layout of its archive:

    root/wnids.txt                      one class per line
    root/train/<wnid>/images/*.JPEG
    root/val/images/*.JPEG
    root/val/val_annotations.txt        file name, tab, wnid, tab, a box
"""

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchvision.transforms import v2

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import Transform
from dp_lightning.datamodules.decoding import Window, fitted, luma
from dp_lightning.datamodules.file_source import READ_FIRST_BELOW, FileSource, require_readable
from dp_lightning.datamodules.listing import SPLIT_NAMES, files_in, image_files, split_of, what_is_in
from dp_lightning.datamodules.tables import Table, tables_beside
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import Group, checked_group, checked_groups

_Found = TypeVar("_Found")


def as_test_set(found: dict[Split, _Found]) -> dict[Split, _Found]:
    """Return the splits in their order, with the validation set as the test set if that is missing."""
    if "val" in found and "test" not in found:
        found["test"] = found.pop("val")
    return {split: found[split] for split in SPLIT_NAMES if split in found}


class ImageFolder(ImageDataModule):
    """A tree of class folders. Images of any size and kind become squares of ``image_size`` pixels, in RGB or grey.

    The shorter side is resized to ``image_size`` and the centre is cropped. ``root/val`` is the validation set and
    ``root/test`` the test set; if there is only ``root/val``, it is the test set. Other names are understood, in any
    case: ``SPLIT_NAMES``. Classes are the names of the folders in ``root/train``, in alphabetical order; the other sets
    may lack some of them. Warnings name folders of images in ``root`` that are not read, and count the files without
    the extension of an image; an image at another depth of the tree is an error. Images are turned as their EXIF
    orientation says.

    Args:
        root: Folder that holds ``train`` and ``val`` or ``test``.
        image_size: Height and width of an image as the network receives it, in pixels.
        in_channels: 3 for colour, 1 for grey. Images without colours need no more: scattering then has a third of the
            features, so that the noise is less.
        window: The values in the files, of whatever depth, that are black and white, such as ``[0, 4095]`` for 12 bits;
            of DICOM, the values after rescale slope and intercept. What lies between them gets 256 levels. A public
            choice: take it from what is known of the modality. None is for files of 8 bits, and refuses others.
        flip: Mirror training images at random; set it to false if a mirrored image means something else.
        read_first: Decode every file first, and name all that cannot be read. Without it, such a file stops the run
            when it is drawn, and the run can resume only after the file is replaced: removing it would change the
            training set. None reads them first if there are fewer than ``READ_FIRST_BELOW`` files. A command that does
            not train reads only the evaluation images.
        group_folders: Whether each class folder holds a folder per person, with the person's images. Folders with the
            same name are the same person, in all classes and sets.
        group_file: A CSV file with a header that says which person each image belongs to. It names an image by its path
            or the end of it, such as its name, with or without the extension. A table such as ``test.csv`` is read
            beside ``train.csv``.
        group_column: The column of ``group_file`` with the person ids.
        image_column: The column of ``group_file`` with the image names.

    Raises:
        ConfigurationError: The settings for persons contradict each other.
    """

    #: The names of the folders in ``root`` that are read.
    split_names: tuple[Split, ...] = ("train", "val", "test")
    image_size = 64
    in_channels = 3

    def __init__(
        self,
        root: str,
        *,
        image_size: int = 64,
        in_channels: Literal[1, 3] = 3,
        window: Window | None = None,
        flip: bool = True,
        read_first: bool | None = None,
        group_folders: bool = False,
        group_file: str | None = None,
        group_column: str | None = None,
        image_column: str = "file",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)
        self.image_size, self.in_channels = image_size, in_channels
        self.window, self.flip, self.read_first = window, flip, read_first
        if (group_file is None) != (group_column is None) or (group_folders and group_file is not None):
            raise ConfigurationError(
                f"{group_folders=}, {group_file=} and {group_column=} do not say which images belong to the same "
                "person: set group_folders alone, or group_file and group_column, its column with the person ids."
            )
        self.group_folders = group_folders
        self.group_file, self.group_column, self.image_column = group_file, group_column, image_column

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the class folders of the training set in alphabetical order, without hidden folders."""
        folder = self.split_folders["train"]
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
        if not names:
            raise DataError(
                f"{folder} has no class folders; each class needs a folder of its images. {what_is_in(folder)}"
            )
        return names

    @property
    def resized_to(self) -> int:
        return self.image_size

    @property
    def num_available(self) -> int:
        return len(self._files["train"].paths)

    @property
    def own_splits(self) -> tuple[Split, ...]:
        return tuple(self.split_folders)

    @cached_property
    def split_folders(self) -> dict[Split, Path]:
        """The folder of each split that the data has."""
        entries = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir()) if self.root.is_dir() else []
        folders = {split_of(name): self.root / name for name in reversed(entries) if split_of(name)}
        found = {split: folders[split] for split in self.split_names if split in folders}
        if "train" not in found:
            raise DataError(
                f"{self.root / 'train'} is missing; set {self.settings}.root to the folder that holds "
                "train/<class>/<image files>"
            )
        unread = [self.root / name for name in entries if self.root / name not in folders.values() and name[0] != "."]
        if passed_over := [str(folder) for folder in unread if files_in(folder)[0]]:
            names = ", ".join(name for names in SPLIT_NAMES.values() for name in names)
            rank_zero_warn(
                f"The images in {', '.join(passed_over)} are not read. Each split has one folder, called one of "
                f"{names}: rename or merge a folder that is part of one."
            )
        return as_test_set(found)

    def prepare_data(self) -> None:
        trains = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        files = {split: source.paths for split, source in self._files.items() if trains or split != "train"}
        few = sum(map(len, files.values())) < READ_FIRST_BELOW
        if few if self.read_first is None else self.read_first:
            for split, paths in files.items():
                require_readable(paths, str(self.split_folders[split]), self.window)

    def read_split(self, split: Split) -> FileSource:
        return self._files[split]

    def groups(self, split: Split) -> list[Group] | None:
        return self._files[split].persons

    def image_transform(self) -> Transform:
        shorter, size = self.resized_to, self.image_size
        return partial(fitted, shorter_side=shorter, size=size, in_channels=self.in_channels)

    @cached_property
    def _files(self) -> dict[Split, FileSource]:
        """The images of each split, of which none is read.

        Raises:
            DataError: A class is not one of the training set's, or a table does not say which person an image shows.
        """
        found: dict[Split, FileSource] = {}
        for split, folder in self.split_folders.items():
            pairs = self._listed(split, folder)
            paths, labels = [path for path, _ in pairs], self._labels(split, [names for _, names in pairs])
            persons: list[Group] | None = None
            if self.group_folders:
                persons = checked_groups([Path(path).parent.name for path in paths], str(folder))
            elif self.group_file is not None and self.group_column is not None:
                persons = self._in_table(paths, split, Path(self.group_file), self.group_column)
            found[split] = FileSource(paths, labels, persons, self.window)
        return found

    def _labels(self, split: Split, names: Sequence[Sequence[str]]) -> Tensor:
        """Return the labels of a split, int64 (n,) or float32 (n, L), from the names of those of each image."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if unknown := sorted({name for labels in names for name in labels} - set(numbers)):
            raise DataError(
                f"The {split} images in {self.split_folders[split]} have classes that no training image has: "
                f"{', '.join(unknown)}. Remove these images, or move some of them to the training set."
            )
        if not self.multi_label:
            return torch.tensor([numbers[name] for (name,) in names])
        return torch.tensor([[float(name in labels) for name in numbers] for labels in names])

    def _in_table(self, paths: Sequence[str], split: Split, path: Path, column: str) -> list[Group] | None:
        """Return the person of each image; None if a table lists none of them and they are not the training images."""
        table = Table.read(tables_beside(path).get(split, path))
        if split != "train" and column not in table.columns:
            return None
        rows = table.rows_of(paths, self.image_column, [column])
        if split != "train" and not any(rows):
            return None
        if None in rows:
            raise DataError(
                f"{table.path} does not say which person {paths[rows.index(None)]} belongs to. Add a row for it: its "
                "path or its name, with or without the extension, and the person id."
            )
        return [checked_group(row.cells[column], row.where) for row in rows if row is not None]

    def _listed(self, split: Split, folder: Path) -> list[tuple[str, tuple[str, ...]]]:
        """Return the path of each image of a split, and the names of its labels.

        Raises:
            DataError: An image is not in the folder of a class, or of a person, or a class has no training images.
        """
        wanted = ("<class>", "<person>", "<image>") if self.group_folders else ("<class>", "<image>")
        pairs: list[tuple[str, tuple[str, ...]]] = []
        for path in image_files(folder):
            parts = path.removeprefix(f"{folder}{os.sep}").split(os.sep)
            if len(parts) != len(wanted):
                raise DataError(
                    f"{path} is not {folder / '/'.join(wanted)}. Move or remove it; "
                    f"{self.settings}.group_folders: true is for class folders with a folder per person."
                )
            pairs.append((path, (parts[0],)))
        present = {name for _, (name,) in pairs}
        empty = [folder / name for name in self.class_names if name not in present]
        if not pairs or (split == "train" and empty):
            raise DataError(
                f"{'The training set is empty: ' if split == 'train' and not pairs else ''}no image files are in "
                f"{', '.join(map(str, empty[:3]))}; remove the folder or fill it. "
                f"{what_is_in(empty[0] if pairs else folder)}"
            )
        return pairs


class ImageNet(ImageFolder):
    """ImageNet-1k (Russakovsky et al. 2015) in class folders; ``root/val`` is the test set.

    Training images are random crops of 8 to 100 % of the area, resized and mirrored at random; without
    ``augment``, and in the test set, the shorter side is resized to 256 / 224 of ``image_size`` and the centre is
    cropped.

    Args:
        root: Folder that holds ``train`` and ``val``.
        image_size: Height and width of an image as the network receives it, in pixels.
    """

    split_names = ("train", "val")  # ImageNet's own test folder has no labels
    published_mean, published_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self, root: str, *, image_size: int = 224, **kwargs: Any) -> None:
        super().__init__(root, image_size=image_size, **kwargs)

    def train_transform(self) -> Transform:
        if not self.augment:
            return self.image_transform()
        flip = [v2.RandomHorizontalFlip()] if self.flip else []
        return v2.Compose([v2.RandomResizedCrop(self.image_size), *flip, *([luma] if self.in_channels == 1 else [])])

    @property
    def resized_to(self) -> int:
        return round(self.image_size * 256 / 224)


class TinyImageNet(ImageFolder):
    """Tiny ImageNet (Le and Yang 2015): 200 classes of 500 training images, 64x64 pixels.

    The 10,000 official validation images are the test set; the official test images have no labels and are not used.
    Mean and standard deviation are those of ImageNet.

    Args:
        root: The unpacked folder that holds ``wnids.txt``.
    """

    split_names = ("train", "val")
    published_mean, published_std = ImageNet.published_mean, ImageNet.published_std

    def __init__(self, root: str = "data/tiny-imagenet-200", **kwargs: Any) -> None:
        super().__init__(root, **kwargs)

    @cached_property
    def class_names(self) -> list[str]:
        """The wnids in the order of ``wnids.txt``."""
        return (self.split_folders["train"].parent / "wnids.txt").read_text(encoding="utf-8").split()

    def _listed(self, split: Split, folder: Path) -> list[tuple[str, tuple[str, ...]]]:
        if split == "train":
            return [(path, (wnid,)) for wnid in self.class_names for path in image_files(folder / wnid / "images")]
        rows = (folder / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
        named = [row.split("\t")[:2] for row in rows]
        return [(str(folder / "images" / name), (wnid,)) for name, wnid in named]
