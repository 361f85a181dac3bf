"""The images in a folder, and the persons that a table names for them."""

import csv
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.datamodules.file_source import IMAGE_EXTENSIONS
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group, checked_groups


def image_files(folder: Path) -> list[str]:
    """Return the image files in a folder and its subfolders: those of each folder, then those of its subfolders.

    All are in alphabetical order, without hidden files and folders. A warning counts the files that are not images by
    their names.
    """
    images: list[str] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if name.lower().endswith(IMAGE_EXTENSIONS):
                images.append(os.path.join(parent, name))
            else:
                others[os.path.splitext(name)[1].lower() or "no extension"] += 1
    if others:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(others.items()))
        rank_zero_warn(
            f"Some files in {folder} are not read as images: {kinds}. The names of images end with "
            f"{', '.join(IMAGE_EXTENSIONS)}: convert others, such as .heic, before the first run."
        )
    return images


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
