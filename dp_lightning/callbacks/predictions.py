"""Writes what ``dpl predict`` computes."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from dp_lightning.errors import ConfigurationError


class PredictionFile(BasePredictionWriter):
    """``predictions.csv`` in the log directory: position of the image, class, and the probability of every class.

    Where the data module knows the files of its images (``ImageFiles``), their paths come first.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"trainer.devices and trainer.num_nodes make {trainer.world_size} processes, and each would see a part "
                "of the images. Set trainer.devices: 1 and trainer.num_nodes: 1 to predict."
            )

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        probabilities = torch.cat(list(predictions)).float().cpu()
        path = Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        files = getattr(trainer.datamodule, "paths", None)  # type: ignore[attr-defined]
        name = ["file"] if files else []
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*name, "index", "class", *(f"p{k}" for k in range(probabilities.shape[1]))])
            for index, row in enumerate(probabilities):
                file_name = [str(files[index])] if files else []
                writer.writerow([*file_name, index, int(row.argmax()), *(f"{p:.6g}" for p in row.tolist())])
        trainer.print(f"Predictions are in {path}.")
