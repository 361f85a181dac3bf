"""Images whose labels are in a table instead of the names of their folders."""

from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.datamodules.base import Split
from dp_lightning.datamodules.folder import ImageFolder, as_test_set
from dp_lightning.datamodules.listing import image_files, split_of, what_is_in
from dp_lightning.datamodules.tables import Row, Table, name_in, tables_beside
from dp_lightning.errors import DataError

#: What a column for one label says, in small letters.
ZERO_OR_ONE = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


class ImageTable(ImageFolder):
    """Images in a folder, with their labels in a CSV file with a header, in UTF-8.

    The split of an image is that of its table, if the path of ``label_file`` names the training set: ``test.csv`` is
    read beside ``train.csv``, and ``valid/labels.csv`` beside ``train/labels.csv``. Otherwise it is what the column
    ``split`` says, or else the first folder in the path of the image with the name of a split, or else the training
    set. Rows without an image are left out, and so are images without a row, each with a warning.

    Args:
        root: Folder that holds the images, in any subfolders.
        label_file: The table of the training images, or of all.
        label_column: Its column with the class of each image. A list names columns of 0 and 1, one for each label of
            images that may have several.
        label_separator: What stands between the labels of an image in ``label_column``, such as ``|``, if images may
            have several; None if each has one.
        image_column: The column with the name of each image: its path or the end of it, such as its name, with or
            without the extension.
        group_file: A table that says which person each image belongs to; None is ``label_file``.
        group_column: Its column with the person ids; None if the data does not identify persons.
    """

    def __init__(
        self,
        root: str,
        label_file: str,
        label_column: list[str] | str,
        *,
        label_separator: str | None = None,
        image_column: str = "file",
        group_file: str | None = None,
        group_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        persons = label_file if group_file is None and group_column is not None else group_file
        super().__init__(root, image_column=image_column, group_file=persons, group_column=group_column, **kwargs)
        self.label_file, self.label_column, self.label_separator = label_file, label_column, label_separator

    @property
    def multi_label(self) -> bool:
        return self.label_separator is not None or not isinstance(self.label_column, str)

    @cached_property
    def class_names(self) -> list[str]:
        """The columns of labels, or what the training images have in the column, in the order of numbers or letters."""
        if not isinstance(self.label_column, str):
            return self.label_column
        names = {name for _, labels in self._rows["train"] for name in labels}
        return sorted(names, key=int if all(name.isdecimal() for name in names) else None)

    @cached_property
    def split_folders(self) -> dict[Split, Path]:
        return dict.fromkeys(self._rows, self.root)

    def _listed(self, split: Split, folder: Path) -> list[tuple[str, tuple[str, ...]]]:
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[Split, list[tuple[str, tuple[str, ...]]]]:
        """Path and labels of each image by split.

        Raises:
            DataError: A table or one of its columns is missing or wrong, or no training image has a row.
        """
        images: dict[str, Split | None] = {}
        for file in image_files(self.root):
            folders = Path(file).relative_to(self.root).parts[:-1]
            images[file] = next((split for split in map(split_of, folders) if split), None)
        found: dict[Split, list[tuple[str, tuple[str, ...]]]] = {}
        for of, path in tables_beside(Path(self.label_file)).items():
            table = Table.read(path)
            columns = [self.label_column] if isinstance(self.label_column, str) else self.label_column
            if of not in (None, "train") and not {self.image_column, *columns} <= set(table.columns):
                rank_zero_warn(f"{path} is not read: it has no labels ({', '.join(columns)}).")
                continue
            splits = [column for column in table.columns if column.lower() == "split" and of is None]
            files = [file for file, folder in images.items() if of is None or folder in (of, None)]
            rows = table.rows_of(files, self.image_column, columns + splits)
            named = {name_in(row.cells[self.image_column]) for row in table.rows}
            if alone := named - {name_in(row.cells[self.image_column]) for row in rows if row is not None}:
                rank_zero_warn(
                    f"{len(alone):,} of {len(named):,} images that {path} names are not there: {min(alone)} and so on."
                )
            for file, row in zip(files, rows, strict=True):
                if row is None:
                    continue
                split = of or (split_of(row.cells[splits[0]]) if splits else images[file] or "train")
                if split is None:
                    raise DataError(f"{row.where}: {splits[0]} is {row.cells[splits[0]]!r}, not train, val or test.")
                found.setdefault(split, []).append((file, self._labels_in(row)))
        splits_of: dict[str, Split] = {}
        for split, file in ((split, file) for split, rows in found.items() for file, _ in rows):
            if splits_of.setdefault(file, split) != split:
                raise DataError(f"{file} is among the {splits_of[file]} and the {split} images. Leave one of its rows.")
        if "train" not in found:
            seen = f"The first image is {min(images)}." if images else what_is_in(self.root)
            raise DataError(
                f"The training set is empty: {self.label_file} names none of its images in column {self.image_column}. "
                f"{seen} Set {self.settings}.image_column, or write the names or paths of the images there."
            )
        if without_row := set(images) - set(splits_of):
            rank_zero_warn(
                f"{len(without_row):,} of {len(images):,} images are not read, since they have no row in the table: "
                f"{min(without_row)} and so on."
            )
        return as_test_set(found)

    def _labels_in(self, row: Row) -> tuple[str, ...]:
        """Return the labels of an image."""
        if not isinstance(self.label_column, str):
            for column in self.label_column:
                if row.cells[column].lower() not in ZERO_OR_ONE:
                    raise DataError(f"{row.where}: {column} is {row.cells[column]!r}, and must be 0 or 1.")
            return tuple(column for column in self.label_column if ZERO_OR_ONE[row.cells[column].lower()])
        text = row.cells[self.label_column]
        if self.label_separator is not None:  # a list of Python is understood as well
            return tuple(filter(None, (part.strip(" []'\"") for part in text.split(self.label_separator))))
        if not text:
            raise DataError(f"{row.where}: {self.label_column} is empty. Give the image a label, or remove the row.")
        return (text,)
