"""The images in folders: their paths, classes and persons, from the names of files and from a table."""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dp_lightning.datamodules.file_source import IMAGE_EXTENSIONS, FileNames
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group, checked_groups


class Listing(NamedTuple):
    """What is known of the images of a split before one is read, in one order.

    Attributes:
        paths: The files.
        labels: Their classes, int64 (n,).
        persons: The person of each file; None if the data does not identify persons.
    """

    paths: FileNames
    labels: Tensor
    persons: list[Group] | None


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in ``folder``, in alphabetical order; hidden folders are left out."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def class_names(folder: Path) -> list[str]:
    """Return the names of the class folders in ``folder``, as ``subfolders``.

    Raises:
        DataError: There are none.
    """
    names = subfolders(folder)
    if not names:
        raise DataError(f"{folder} has no class folders; each class needs a folder of its images")
    return names


def image_files(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the paths of the image files directly inside ``folder``, in alphabetical order without hidden files.

    Everything else is counted in ``left_out``, by extension.

    Raises:
        DataError: There is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; copy or unpack the images again")
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(IMAGE_EXTENSIONS) and entry.is_file():
                names.append(entry.name)
            elif not entry.name.startswith("."):
                left_out["folder" if entry.is_dir() else Path(entry.name).suffix.lower() or "no extension"] += 1
    return [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]


def images_of_persons(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the paths of the image files in the folders of persons inside ``folder``; otherwise as ``image_files``.

    Raises:
        DataError: An image is not in a person's folder.
    """
    beside: Counter[str] = Counter()
    if lone := image_files(folder, beside):
        raise DataError(f"{lone[0]} is not in a person's folder; with group_folders each image must be in one")
    del beside["folder"]
    left_out.update(beside)
    return [path for person in subfolders(folder) for path in image_files(folder / person, left_out)]


def warn_of_left_out(left_out: Mapping[str, int], root: Path) -> None:
    """Warn about entries that are not images by their names; ``left_out`` counts them by extension."""
    if left_out:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(left_out.items()))
        rank_zero_warn(
            f"Some entries in {root} are not read as images: {kinds}. The names of images end with "
            f"{', '.join(IMAGE_EXTENSIONS)}: convert others, such as .heic, before the first run."
        )


def persons_of_files(
    files: Sequence[str], root: Path, table: Path, *, file_column: str, group_column: str, required: bool
) -> list[Group] | None:
    """Return the person of each file; None if the table lists none of them, unless they are ``required``.

    A file is named in the table by its path from ``root``, by its name, or by its name without the extension.

    Args:
        table: A CSV file with a header, in UTF-8.
        file_column: The column with the file names.
        group_column: The column with the person ids.

    Raises:
        DataError: The table or a column is missing, a file is not in it or has two persons, a row matches two files,
            or an id is missing.
    """
    persons = _read(table, file_column, group_column)
    names = [(PurePath(file).relative_to(root).as_posix(), PurePath(file).name, PurePath(file).stem) for file in files]
    rows = [next((name for name in of_file if name in persons), None) for of_file in names]
    if not required and not any(rows):
        return None
    used: dict[str, str] = {}
    for file, row in zip(files, rows, strict=True):
        if row is None:
            raise DataError(
                f"{table} does not say which person {file} belongs to. Add a row for it: its path from {root}, its "
                "name or its name without the extension, and the person id."
            )
        if used.setdefault(row, file) != file:
            raise DataError(
                f"{table}: {row} could be {used[row]} or {file}. In the table, name files by their path from {root}."
            )
    return checked_groups([persons[row] for row in rows if row is not None], str(table))


def _read(table: Path, file_column: str, group_column: str) -> dict[str, str]:
    """Return the person of each file by the name that the table has for the file."""
    persons: dict[str, str] = {}
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or ()
            for column in (file_column, group_column):
                if column not in columns:
                    raise DataError(
                        f"{table} has no column {column!r}; it has {', '.join(columns) or 'none'}. Set "
                        "file_column and group_column."
                    )
            for row in rows:
                name, person = ((row[column] or "").strip() for column in (file_column, group_column))
                if persons.setdefault(name, person) != person:
                    raise DataError(
                        f"{table}, line {rows.line_num}: {name} belongs to {person!r} here, but to {persons[name]!r} "
                        "before. Give each file one person."
                    )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as a table ({error}); set group_file") from error
    return persons
