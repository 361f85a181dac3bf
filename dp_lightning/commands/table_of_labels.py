"""The table that says what the images of a folder show, as `dpl init` finds it."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from dp_lightning.datamodules.image_table import ZERO_OR_ONE
from dp_lightning.datamodules.listing import files_in
from dp_lightning.datamodules.tables import Table, name_in, names_of, tables_beside
from dp_lightning.errors import DataError

# Names of columns, in small letters: of labels, and of persons.
_LABELS = r".*(label|class|categor|target|diagnos|finding|tags|species|breed|grade|level).*|dx|y"
_PERSONS = r"(patient|person|subject|participant|owner)s?[ _]?(id|no|nr|number|name|key)?"


def settings_of_table(root: Path, options: Namespace, *, required: bool) -> dict[str, Any] | None:
    """Return the settings of ``ImageTable`` for a folder; None if no table in or beside it has labels of its images.

    Args:
        options: of `dpl init`; they take precedence over what is found.
        required: whether nothing else can say the labels; without it, an error becomes None.

    Raises:
        DataError: a table is malformed, or it is unknown which of its columns has the labels.
    """
    names = {name for file in files_in(root)[0] for name in names_of(file)}
    near = [path for end in ("csv", "tsv") for path in (*root.rglob(f"*.{end}"), *root.parent.glob(f"*.{end}"))]
    near.sort(key=lambda path: (None in tables_beside(path), len(path.parts), path))  # of training images first
    problem: DataError | None = None
    for path in [options.label_file] if options.label_file else near:
        try:
            table = Table.read(path)
        except DataError as error:
            if options.label_file or root in path.parents:
                problem = problem or error
            continue
        found = {column: sum(name_in(row.cells[column]) in names for row in table.rows) for column in table.columns}
        image = options.image_column or max(
            table.columns, key=lambda c: (found[c], re.search("image|file|path", c.lower()) is not None), default=""
        )
        if not found.get(image) and not options.label_file:
            continue
        person = options.group_column or next((c for c in table.columns if re.fullmatch(_PERSONS, c.lower())), None)
        others = [name for name in table.columns if name not in (image, person) and name.lower() != "split"]
        if not (labels := options.label_column or _labels(table, others)):
            problem = problem or DataError(
                f"{path} has images in column {image}; which has the labels: {', '.join(others)}? Give --label-column."
            )
            continue
        settings = {"label_file": str(path), "label_column": labels if len(labels) > 1 else labels[0]}
        cells = {row.cells.get(labels[0], "") for row in table.rows} if len(labels) == 1 else set[str]()
        for separator in "|;,":  # with it there are fewer labels than cells
            if len({part for cell in cells for part in cell.split(separator)}) < len(cells):
                settings["label_separator"] = separator
        return {**settings, "image_column": image, **({} if person is None else {"group_column": person})}
    if problem is not None and required:
        raise problem
    return None


def _labels(table: Table, columns: list[str]) -> list[str]:
    """Return the column with the labels, or columns of 0 and 1; none if it is unclear."""
    named = [name for name in columns if re.fullmatch(_LABELS, name.lower())]
    binary = [name for name in columns if all(row.cells[name].lower() in ZERO_OR_ONE for row in table.rows)]
    if classes := [name for name in named if name not in binary or len(named) == 1]:
        return classes[:1]
    return binary if len(binary) > 1 else []
