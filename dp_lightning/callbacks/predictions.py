"""Writes what ``dpl predict`` computes."""

import csv
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.callbacks.data_record import DataRecord
from dp_lightning.errors import ConfigurationError


class PredictionFile(BasePredictionWriter):
    """``predictions.csv`` in ``trainer.default_root_dir``: position of an image, class, and probability of each class.

    Where the data module knows the files of its images (``ImageFiles``), their paths come first; where the run knows
    the names of its classes, that of the found one follows its number. A file that exists is never overwritten.

    Raises:
        ConfigurationError: before anything is predicted, if the file exists or cannot be written, or if several
            processes would predict.
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
        files = getattr(trainer.datamodule, "paths", None)  # type: ignore[attr-defined]
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        classes = next((callback.class_names for callback in callbacks if isinstance(callback, DataRecord)), None)
        count = probabilities.shape[1]
        classes = classes if classes is not None and len(classes) == count else None
        columns = [*(["file"] if files else []), "index", "class", *(["class_name"] if classes else [])]
        # File names are bytes; those that are not UTF-8 are written as they were.
        with replacing(self._path) as raw:
            file = TextIOWrapper(raw, "utf-8", "surrogateescape", newline="")
            writer = csv.writer(file)
            writer.writerow([*columns, *(f"p{k}" for k in range(count))])
            for index, row in enumerate(probabilities):
                found = int(row.argmax())
                said = [*([str(files[index])] if files else []), index, found, *([classes[found]] if classes else [])]
                writer.writerow([*said, *(f"{p:.6g}" for p in row.tolist())])
            file.detach()  # which flushes it, and leaves the file open
        trainer.print(f"Predictions are in {self._path}.")
