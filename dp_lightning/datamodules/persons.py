"""Persons of a data set: their ids in a table of files, and a warning if some are both trained on and evaluated."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group, checked_groups


def warn_of_shared_persons(trained: Iterable[Group], evaluated: Iterable[Group], split: str) -> None:
    """Warn if some persons are both in the training set and in another ``split``."""
    if shared := set(trained) & set(evaluated):
        rank_zero_warn(
            f"Some persons of the training set are also in the {split} images, such as {min(shared)!r}. Numbers "
            "computed from those images are outside the guarantee, and say less about new persons. Remove these "
            "persons from one of the two."
        )


class PersonIds(Dataset[Group]):
    """The person id of each image. Since this is a data set, it cannot be read while a loss is computed.

    Args:
        ids: As ``checked_groups`` returns them.
    """

    def __init__(self, ids: Sequence[Group]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._ids)

    def __getitem__(self, index: int) -> Group:
        return self._ids[index]

    def at(self, indices: Tensor) -> "PersonIds":
        """The ids of the images at ``indices``, int64 (n,)."""
        return PersonIds([self._ids[index] for index in indices.tolist()])

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The number of each image's person; persons are numbered in the order of their ids."""
        number = {group: place for place, group in enumerate(sorted(set(self._ids)))}
        return np.array([number[group] for group in self._ids])

    @property
    def count(self) -> int:
        """The number of persons."""
        return len(set(self._ids))


class GroupTable:
    """Which person each file belongs to, from a CSV file with a header.

    Args:
        path: The file, in UTF-8.
        file_column: The column with the file names.
        group_column: The column with the person ids.

    Raises:
        DataError: The file or a column is missing, or a file is listed with two persons.
    """

    def __init__(self, path: Path, *, file_column: str, group_column: str) -> None:
        self.path = path
        self._groups: dict[str, str] = {}
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = csv.DictReader(file)
                for name in (file_column, group_column):
                    if name not in (rows.fieldnames or ()):
                        raise DataError(
                            f"{path} has no column {name!r}; it has {', '.join(rows.fieldnames or ()) or 'none'}. Set "
                            "data.init_args.file_column and group_column."
                        )
                for row in rows:
                    named, group = ((row[name] or "").strip() for name in (file_column, group_column))
                    if self._groups.setdefault(named, group) != group:
                        raise DataError(
                            f"{path}, line {rows.line_num}: {named} belongs to {group!r} here, but to "
                            f"{self._groups[named]!r} before. Give each file one person."
                        )
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read as a table ({error}); set data.init_args.group_file") from error

    def groups(self, files: Sequence[str], root: Path, *, required: bool) -> PersonIds | None:
        """The person of each file; None if the table lists none of them, unless they are required.

        A file is named in the table by its path from ``root``, by its name, or by its name without the extension.

        Raises:
            DataError: A file is not in the table, a row matches two files, or an id is missing.
        """
        used: dict[str, str] = {}
        found = []
        rows = [self._row(PurePath(file), root) for file in files]
        if not required and not any(rows):
            return None
        for file, named in zip(files, rows, strict=True):
            if named is None:
                raise DataError(
                    f"{self.path} does not say which person {file} belongs to. Add a row for it: its path from {root}, "
                    "its name or its name without the extension, and the person id."
                )
            if used.setdefault(named, file) != file:
                raise DataError(
                    f"{self.path}: {named} could be {used[named]} or {file}. In the table, name files by their path "
                    f"from {root}."
                )
            found.append(self._groups[named])
        return PersonIds(checked_groups(found, str(self.path)))

    def _row(self, file: PurePath, root: Path) -> str | None:
        """How the table names a file; None if it does not list it."""
        names = file.relative_to(root).as_posix(), file.name, file.stem
        return next((name for name in names if name in self._groups), None)
