"""The images in a folder: which files they are, and which split a name means."""

import os
from collections import Counter
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.datamodules.base import Split
from dp_lightning.datamodules.file_source import IMAGE_EXTENSIONS

#: The names of folders, tables and cells that mean a split, in small letters.
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
_NOT_IMAGES = (
    f"The names of images end with {', '.join(IMAGE_EXTENSIONS)}: convert others, such as .heic, and let the names of "
    "DICOM files end with .dcm."
)
# What stands beside images and needs no warning.
_TEXTS = (".csv", ".tsv", ".txt", ".json", ".xml", ".md")


def split_of(name: str) -> Split | None:
    """Return the split that a name in any case means."""
    return next((split for split, names in SPLIT_NAMES.items() if name.lower() in names), None)


def files_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the image files in a folder and its subfolders, and the other files.

    Those of each folder come before those of its subfolders, all in alphabetical order, without hidden ones.
    """
    images: list[str] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            (images if name.lower().endswith(IMAGE_EXTENSIONS) else others).append(os.path.join(parent, name))
    return images, others


def image_files(folder: Path) -> list[str]:
    """Return the image files of ``files_in``; a warning counts the other files by their names, but for texts."""
    images, others = files_in(folder)
    if others := [file for file in others if not file.lower().endswith(_TEXTS)]:
        rank_zero_warn(f"Some files in {folder} are not read as images: {kinds_of(others)}. {_NOT_IMAGES}")
    return images


def kinds_of(files: list[str]) -> str:
    """Count files by the ends of their names, such as ``6 x .dcm, 1 x .txt``."""
    kinds = Counter(os.path.splitext(file)[1].lower() or "no extension" for file in files)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def what_is_in(folder: Path) -> str:
    """Say which files a folder without images holds, and what to do with them."""
    others = files_in(folder)[1]
    return f"{folder} holds {kinds_of(others)}. {_NOT_IMAGES}" if others else f"{folder} holds no files."
