"""Training steps that a Lightning Trainer takes: the ordinary ones, and those of ``PrivacyCallback``.

A step is a logical one, and everything from the end of one to the end of the next: the loader, forward and backward
passes, clipping, noise, journal and the optimizer.
"""

import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback

WAYS: dict[str, Literal["flat", "per_layer"] | None] = {
    "ordinary": None,
    "ours flat": "flat",
    "ours per-layer": "per_layer",
}


class _Classifier(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class _AfterEachStep(pl.Callback):
    """Asks whether to go on."""

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        self._goes_on = goes_on

        self._steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            trainer.should_stop = not self._goes_on()


def take_steps(
    way: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    goes_on: Callable[[], bool],
    *,
    pieces: int = 1,
    bf16: bool = False,
) -> None:
    """Take steps on all of the images, in so many physical batches, until ``goes_on`` returns False."""
    clipping, count = WAYS[way], len(images)
    callbacks: list[pl.Callback] = [_AfterEachStep(goes_on)]
    if clipping is not None:
        callbacks.append(
            PrivacyCallback(
                expected_batch_size=count,
                noise_multiplier=1.0,
                delta=0.1 / count,
                accountant="rdp",
                clipping=clipping,
                max_physical_batch_size=count // pieces,
            )
        )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder, redirect_stdout(None):
        trainer = pl.Trainer(
            max_steps=1000,
            accumulate_grad_batches=pieces if clipping is None else 1,
            callbacks=callbacks,
            accelerator="gpu" if images.is_cuda else "cpu",
            devices=1,
            precision="bf16-mixed" if bf16 else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        data = cast(Any, TensorDataset(images.cpu(), labels.cpu()))
        trainer.fit(_Classifier(model), DataLoader(data, batch_size=count // pieces))
