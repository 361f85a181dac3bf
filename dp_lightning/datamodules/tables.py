"""Tables that say what the images of a folder show, or whose they are: CSV files with a header, in UTF-8."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from dp_lightning.datamodules.base import Split
from dp_lightning.datamodules.listing import split_of
from dp_lightning.errors import DataError


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        where: The file and the line, for messages.
        cells: The text of each column, without spaces around it.
    """

    where: str
    cells: dict[str, str]


@dataclass(frozen=True)
class Table:
    """A table whose columns are separated by commas, semicolons or tabs: by that which its header has most of."""

    path: Path
    columns: list[str]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Read a table; empty rows are left out.

        Raises:
            DataError: It is missing or not in UTF-8, or a row has more or fewer cells than the header.
        """
        rows: list[Row] = []
        try:
            text = path.read_text(encoding="utf-8-sig")
            reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=text.partition("\n")[0].count))
            columns = [name.strip() for name in next(reader, [])]
            for cells in reader:
                where = f"{path}, line {reader.line_num}"
                if any(cells) and len(cells) != len(columns):
                    raise DataError(f"{where}: the row has {len(cells)} cells, and the header has {len(columns)}.")
                if any(cells):
                    rows.append(Row(where, dict(zip(columns, map(str.strip, cells), strict=True))))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as a table ({error}). Save it as CSV in UTF-8.") from error
        return cls(path, columns, rows)

    def rows_of(self, files: Sequence[str], image_column: str, columns: Sequence[str]) -> list[Row | None]:
        """Return the row of each file, or None.

        Raises:
            DataError: A column is missing, two rows of a file differ in one of ``columns``, or a row names two files.
        """
        if missing := {image_column, *columns} - set(self.columns):
            raise DataError(
                f"{self.path} has no column {min(missing)!r}; it has {', '.join(self.columns) or 'none'}. Set "
                "image_column, label_column and group_column to the names of columns."
            )
        rows: dict[str, Row] = {}
        for row in self.rows:
            name = name_in(row.cells[image_column])
            earlier = rows.setdefault(name, row)
            for column in columns:
                if row.cells[column] != earlier.cells[column]:
                    raise DataError(
                        f"{row.where}: {name} has {row.cells[column]!r} in {column} here, but "
                        f"{earlier.cells[column]!r} before. Give each image one row."
                    )
        taken: dict[str, str] = {}
        found: list[Row | None] = []
        for file in files:
            name = next((name for name in names_of(file) if name in rows), "")
            if name and taken.setdefault(name, file) != file:
                raise DataError(
                    f"{self.path}: {name} could be {taken[name]} or {file}. In the table, name images by their paths."
                )
            found.append(rows.get(name) if name else None)
        return found


def name_in(cell: str) -> str:
    """Return what a table calls a file, with slashes and none at the beginning."""
    return cell.replace("\\", "/").removeprefix("./").lstrip("/")


def names_of(file: str) -> Iterator[str]:
    """Yield what a table may call a file: its path or the end of it, also without the extension; longer ones first."""
    parts = PurePath(Path(file).absolute()).parts[1:]
    for start in range(len(parts)):
        name = "/".join(parts[start:])
        yield from (name, name.removesuffix(PurePath(file).suffix))


def tables_beside(path: Path) -> dict[Split | None, Path]:
    """Return the table of each split, of which ``path`` is that of the training set.

    The others have the same path but for the name of the split: ``valid.csv`` for ``train.csv``, ``test/labels.csv``
    for ``train/labels.csv``. A table whose path names no training set has the images of all splits: its key is None.
    """
    own = path.absolute()
    parts = re.fullmatch(r"(.*(?<![a-z]))(train|training)((?![a-z]).*)", f"{own.parent.name}/{own.name}", re.IGNORECASE)
    if parts is None:
        return {None: path}
    found: dict[Split | None, Path] = {"train": path}
    for other in sorted([*own.parent.glob(f"*{own.suffix}"), *own.parent.parent.glob(f"*/{own.name}")]):
        name = f"{other.parent.name}/{other.name}".removeprefix(parts[1]).removesuffix(parts[3])
        if (split := split_of(name)) is not None:
            found.setdefault(split, other)
    return found
