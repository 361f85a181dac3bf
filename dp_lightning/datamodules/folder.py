"""Images in a tree of class folders.

    root/train/<class>/*
    root/val/<class>/*      or root/test, or both
    root/train/<class>/<person>/*, if each person has a folder

Counts come from file names; an image is opened when a batch needs it.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchvision.transforms import v2

from dp_lightning.datamodules.augmentation import CropAndFlip, RandomResizedCrop
from dp_lightning.datamodules.base import LARGEST_SIDE, ImageDataModule, Split, checked_labels, require_whole
from dp_lightning.datamodules.dataset import Transform
from dp_lightning.datamodules.file_source import IMAGE_EXTENSIONS, FileNames, FileSource, grey
from dp_lightning.datamodules.persons import GroupTable, PersonIds
from dp_lightning.datamodules.reading_first import READ_FIRST_BELOW, require_readable
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import checked_groups

# Empty class folders that are named.
_NAMED = 3


class ImageFolder(ImageDataModule):
    """A tree of class folders. Images of any size and kind become squares of ``image_size`` pixels, in RGB or grey.

    The shorter side is resized to ``image_size`` and the centre is cropped. ``root/val`` is the validation set and
    ``root/test`` the test set; if there is only ``root/val``, it is the test set. Classes are the names of the folders
    in ``root/train``, in alphabetical order; the other sets may lack some of them. Files with an image extension
    directly inside a class folder are its images; a warning lists what else is there. The values of 16-bit grey images
    range from 0 to 65,535.

    Args:
        root: Folder that holds ``train`` and ``val`` or ``test``.
        image_size: Height and width of an image as the network receives it, in pixels.
        in_channels: 3 for colour, 1 for grey. Images without colours need no more: scattering then has a third of the
            features, so that the noise is less.
        flip: Mirror training images at random; set it to false if a mirrored image means something else.
        read_first: Decode every file first, and name all that cannot be read. Without it, such a file stops the run
            when it is drawn, and the run can resume only after the file is replaced: removing it would change the
            training set. None reads them first if there are fewer than ``READ_FIRST_BELOW`` files. A command that does
            not train reads only the evaluation images.
        group_folders: Whether each class folder holds a folder per person, with the person's images. Folders with the
            same name are the same person, in all classes and sets.
        group_file: A CSV file with a header that says which person each image belongs to. It names an image by its path
            from ``root``, by its name, or by its name without the extension.
        group_column: The column of ``group_file`` with the person ids.
        file_column: The column of ``group_file`` with the image names.

    Raises:
        ConfigurationError: The settings for persons contradict each other, ``image_size`` is below 1, or
            ``in_channels`` is neither 1 nor 3.
    """

    in_channels = 3

    def __init__(
        self,
        root: str,
        *,
        image_size: int = 64,
        in_channels: int = 3,
        flip: bool = True,
        read_first: bool | None = None,
        group_folders: bool = False,
        group_file: str | None = None,
        group_column: str | None = None,
        file_column: str = "file",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_channels(in_channels)
        self.in_channels = in_channels
        require_whole("image_size", image_size, at_least=1, at_most=LARGEST_SIDE)
        self.root, self.size = Path(root), image_size
        self.flip, self.read_first = flip, read_first
        if (group_file is None) != (group_column is None):
            raise ConfigurationError(
                f"data.init_args.group_file is {group_file} and group_column is {group_column}; set both: the "
                "table and its column with the person ids."
            )
        if group_folders and group_file is not None:
            raise ConfigurationError(
                "data.init_args.group_folders and group_file both say which images belong to the same person; set only "
                "one of them."
            )
        self.group_folders = group_folders
        self.group_file, self.group_column, self.file_column = group_file, group_column, file_column

    @property
    def image_size(self) -> int:
        return self.size

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def class_names(self) -> list[str]:
        return self.classes

    @property
    def resized_to(self) -> int:
        return self.image_size

    @property
    def num_available(self) -> int:
        return len(self._files["train"][0])

    @property
    def own_splits(self) -> tuple[Split, ...]:
        return tuple(self.split_folders)

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        return class_names(self.split_folders["train"])

    @cached_property
    def split_folders(self) -> dict[Split, Path]:
        """The folder of each split that the data has."""
        names: tuple[Split, ...] = ("train", "val", "test")
        found = {name: self.root / name for name in names if (self.root / name).is_dir()}
        if "train" not in found:
            require_folder(self.root, "data.init_args.root")
            require_target(self.root / "train")
            raise DataError(
                f"{self.root / 'train'} is missing; set data.init_args.root to the folder that holds "
                "train/<class>/<image files>"
            )
        if "val" in found and "test" not in found:
            found["test"] = found.pop("val")
        return found

    def prepare_data(self) -> None:
        super().prepare_data()
        trains = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        files = {split: names for split, (names, _) in self._files.items() if trains or split != "train"}
        few = sum(map(len, files.values())) < READ_FIRST_BELOW
        if few if self.read_first is None else self.read_first:
            for split, names in files.items():
                require_readable(names, str(self.split_folders[split]))

    def check_files(self) -> None:
        _ = self._files

    def read_split(self, split: Split) -> FileSource:
        names, labels = self._files[split]
        return FileSource(names, checked_labels(labels, self.num_classes, str(self.split_folders[split])))

    def groups(self, split: Split) -> PersonIds | None:
        return self._groups.get(split)

    def image_transform(self) -> Transform:
        return v2.Compose([v2.Resize(self.resized_to), v2.CenterCrop(self.image_size), *self._after_crop()])

    def _after_crop(self) -> list[Transform]:
        """What is done to an image (3, H, W) that is resized and cropped."""
        return [grey] if self.in_channels == 1 else []

    @cached_property
    def _groups(self) -> dict[Split, PersonIds]:
        """The person of each image by split, if the data identifies persons."""
        files = {split: [names[index] for index in range(len(names))] for split, (names, _) in self._files.items()}
        if self.group_folders:
            return {
                split: PersonIds(
                    checked_groups([Path(name).parent.name for name in names], str(self.split_folders[split]))
                )
                for split, names in files.items()
            }
        if self.group_file is None or self.group_column is None:
            return {}
        table = GroupTable(Path(self.group_file), file_column=self.file_column, group_column=self.group_column)
        told = {split: table.groups(names, self.root, required=split == "train") for split, names in files.items()}
        return {split: groups for split, groups in told.items() if groups is not None}

    @cached_property
    def _files(self) -> dict[Split, tuple[FileNames, Tensor]]:
        """Paths and labels of all images by split."""
        files: dict[Split, tuple[FileNames, Tensor]] = {}
        left_out: Counter[str] = Counter()
        for split, folder in self.split_folders.items():
            names = class_names(folder)
            unknown = sorted(set(names) - set(self.classes))
            if unknown:
                raise DataError(
                    f"{folder} has class folders that {self.split_folders['train']} does not have: "
                    f"{', '.join(unknown)}. The classes are those of the training set; add images of them to it, or "
                    "remove the folders."
                )
            listed_in = files_of_persons if self.group_folders else image_files
            by_class = [listed_in(folder / name, left_out) if name in names else [] for name in self.classes]
            empty = [folder / name for name, found in zip(self.classes, by_class, strict=True) if not found]
            if empty and (split == "train" or not any(by_class)):
                where = _in_words(empty) if split == "train" else f"{folder} holds"
                persons = "; if it contains folders of persons, set data.init_args.group_folders: true"
                raise DataError(
                    f"{where} no image files; remove the folder or fill it{persons if left_out['folder'] else ''}"
                )
            counts = torch.tensor([len(found) for found in by_class])
            listed = FileNames(path for found in by_class for path in found)
            files[split] = listed, torch.arange(len(by_class)).repeat_interleave(counts)
        warn_of_left_out(left_out, str(self.root))
        return files


class ImageNet(ImageFolder):
    """ImageNet-1k (Russakovsky et al. 2015) in class folders; ``root/val`` is the test set.

    Training images are random crops of 8 to 100 % of the area, resized and mirrored at random; without
    ``augment``, and in the test set, the shorter side is resized to 256 / 224 of ``image_size`` and the centre is
    cropped.

    Args:
        root: Folder that holds ``train`` and ``val``.
        image_size: Height and width of an image as the network receives it, in pixels.
        mean: Mean of each channel on the scale 0 to 1: the published constant.
        std: Standard deviation of each channel on the same scale: the published constant.
    """

    def __init__(
        self,
        root: str,
        *,
        image_size: int = 224,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        **kwargs: Any,
    ) -> None:
        super().__init__(root, image_size=image_size, mean=mean, std=std, **kwargs)

    @cached_property
    def split_folders(self) -> dict[Split, Path]:
        # ImageNet's own test folder has no labels.
        folders: dict[Split, Path] = {"train": self.root / "train", "test": self.root / "val"}
        for folder in folders.values():
            if not folder.is_dir():
                raise DataError(
                    f"{folder} is missing; set data.init_args.root to the folder that holds "
                    "train/<class>/*.JPEG and val/<class>/*.JPEG"
                )
        return folders

    def random_transform(self) -> Transform | None:
        return v2.Compose([RandomResizedCrop(self.image_size), *self._after_crop()]) if self.augment else None

    def augmentation(self) -> Transform | None:
        return CropAndFlip(padding=0, flip=True) if self.augment and self.flip else None

    @property
    def resized_to(self) -> int:
        return round(self.image_size * 256 / 224)


def require_channels(in_channels: int) -> None:
    """Refuse a number of channels that image files cannot be read with.

    Raises:
        ConfigurationError: naming the setting.
    """
    if in_channels not in (1, 3):
        raise ConfigurationError(f"data.init_args.in_channels is {in_channels}; files give 1 or 3 channels.")


def class_names(folder: Path) -> list[str]:
    """Names of the class folders in ``folder``, in alphabetical order; hidden folders are left out.

    Raises:
        DataError: There are none.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if _is(entry.is_dir) and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no class folders; each class needs a folder of its images")
    return names


def require_folder(path: Path, name: str) -> None:
    """Refuse a path that does not exist; a link without a target is told as such.

    Args:
        path: the folder.
        name: of the setting that gives it.

    Raises:
        DataError: naming both.
    """
    require_target(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; set {name} to the folder of the images.")


def require_target(path: Path) -> None:
    """Refuse a symbolic link whose target is missing.

    Raises:
        DataError: naming the link and its target.
    """
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a symbolic link to {os.readlink(path)}, which does not exist; correct the link.")


def _in_words(empty: list[Path]) -> str:
    """The folders, or the first of many, with the verb."""
    more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
    return f"{', '.join(map(str, empty[:_NAMED]))}{more} {'holds' if len(empty) == 1 else 'hold'}"


def _is(kind: Callable[[], bool]) -> bool:
    """Whether an entry of a folder is of a kind; a link to itself is of no kind."""
    try:
        return kind()
    except OSError:
        return False


def image_files(folder: Path, left_out: Counter[str]) -> list[str]:
    """The paths of the image files directly inside ``folder``, in alphabetical order; hidden files are left out.

    Everything else is counted in ``left_out``, by extension.
    """
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not _is(entry.is_file):
                left_out["broken link" if entry.is_symlink() else "folder"] += 1
            elif entry.name.lower().endswith(IMAGE_EXTENSIONS):
                names.append(entry.name)
            else:
                left_out[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1
    return [os.path.join(folder, name) for name in sorted(names)]


def files_of_persons(folder: Path, left_out: Counter[str]) -> list[str]:
    """The paths of the image files in the folders of persons inside ``folder``; otherwise as ``image_files``.

    Raises:
        DataError: An image is not in a person's folder.
    """
    beside: Counter[str] = Counter()
    if lone := image_files(folder, beside):
        raise DataError(f"{lone[0]} is not in a person's folder; with group_folders each image must be in one")
    del beside["folder"]
    left_out.update(beside)
    with os.scandir(folder) as entries:
        persons = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return [path for person in persons for path in image_files(folder / person, left_out)]


def warn_of_left_out(left_out: Mapping[str, int], root: str) -> None:
    """Warn about files whose names are not those of images; ``left_out`` counts them by kind."""
    if left_out:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(left_out.items()))
        rank_zero_warn(
            f"Some entries in {root} are not read as images: {kinds}. The names of images end with "
            f"{', '.join(IMAGE_EXTENSIONS)}: convert others, such as .heic, before the first run."
        )
