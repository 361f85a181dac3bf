"""Writes what ``dpl predict`` computes."""

import csv
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import compress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.callbacks.data_record import DataRecord
from dp_lightning.datamodules.file_source import listed
from dp_lightning.errors import ConfigurationError, DataError


class PredictionFile(BasePredictionWriter):
    """``predictions.csv`` in ``trainer.default_root_dir``: position of an image, class, and probability of each class.

    With several labels per image, ``labels`` takes the place of the class: the names or numbers of all labels with a
    probability above 0.5, separated by semicolons.

    Where the data module knows the files of its images (``ImageFiles``), their paths come first; where the run knows
    the names of its classes, the name of the found class follows its number. Files that could not be read, or are not
    images by their names, have no row: their paths are printed with the reasons. Predictions that exist are never
    overwritten.

    Raises:
        ConfigurationError: before anything is predicted, if the file exists or cannot be written, or if several
            processes would predict.
        DataError: if no file could be read.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")
        self._path = Path()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"trainer.devices and trainer.num_nodes make {trainer.world_size} processes, and each would see a part "
                "of the images. Set trainer.devices: 1 and trainer.num_nodes: 1 to predict."
            )
        self._path = Path(trainer.default_root_dir) / "predictions.csv"
        if self._path.exists():
            raise ConfigurationError(
                f"{self._path} exists, and predictions are never overwritten. Move it away, or set "
                "trainer.default_root_dir to another folder."
            )
        require_writable(self._path.parent, "trainer.default_root_dir")

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        probabilities = torch.cat(list(predictions)).float().cpu()
        number, count = probabilities.shape
        data, callbacks = trainer.datamodule, trainer.callbacks  # type: ignore[attr-defined]
        files = getattr(data, "paths", None)
        problems = getattr(data, "problems", None) or [None] * number
        skipped = [(str(file), why) for file, why in zip(files or [], problems, strict=False) if why is not None]
        if skipped and len(skipped) == number:
            raise DataError(f"None of the {number:,} files can be read:\n{listed(skipped)}")
        skipped += [(file, "its name does not end as those of images do") for file in getattr(data, "skipped", ())]
        names = next((callback.class_names for callback in callbacks if isinstance(callback, DataRecord)), None)
        columns: dict[str, Sequence[Any]] = {} if files is None else {"file": files}
        columns["index"] = range(number)
        known = names if names is not None and len(names) == count else None
        if getattr(pl_module, "multi_label", False):
            labels = known or [str(place) for place in range(count)]
            columns["labels"] = [";".join(compress(labels, row)) for row in (probabilities > 0.5).tolist()]
        else:
            columns["class"] = found = probabilities.argmax(1).tolist()
            if known is not None:
                columns["class_name"] = [known[place] for place in found]

        def rows() -> Iterator[list[Any]]:
            """The rows, made one at a time: as text, a thousand probabilities are twenty times as large."""
            yield [*columns, *(f"p{k}" for k in range(count))]
            for row, problem, *said in zip(probabilities, problems, *columns.values(), strict=True):
                if problem is None:
                    yield [*said, *(f"{p:.6g}" for p in row.tolist())]

        with replacing(self._path) as raw:
            # Names of files are bytes, and those that are not UTF-8 are written as they were.
            file = TextIOWrapper(raw, "utf-8", "surrogateescape", newline="")
            csv.writer(file).writerows(rows())
            file.detach()  # writes the rest of the text, and leaves the file open
        trainer.print(f"Predictions are in {self._path}.")
        sums = probabilities.sum(1)
        if not getattr(pl_module, "multi_label", False) and not torch.allclose(sums, torch.ones_like(sums), atol=0.02):
            trainer.print("predict_step returns no probabilities, and p0 and so on are as it returns them.")
        if constant := getattr(data, "num_constant", 0):
            trainer.print(
                f"All pixels are equal in {constant:,} of {number:,} images. Are they in the units of the window, "
                "as the files in training were?"
            )
        if skipped:
            trainer.print(f"These files have no prediction:\n{listed(skipped)}")
