"""A checkpoint of the last step, so that no run ends with a spent budget and without its weights."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(pl.Callback):
    """Lets each ``ModelCheckpoint`` that keeps the latest weights have those of the last step.

    With ``check_val_every_n_epoch`` above one, Lightning saves only after an evaluation: the steps after the last one
    would be spent in vain. A ``ModelCheckpoint`` with a ``monitor`` keeps the best weights, and gets one only if it has
    saved none; one with ``save_top_k: 0`` never.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved_at = -1

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._saved_at = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saved_at != trainer.global_step:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint) and _wants_latest(callback):
                    _save(trainer, callback)


def _wants_latest(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 and (callback.monitor is None or not callback.best_model_path)


def _save(trainer: pl.Trainer, callback: ModelCheckpoint) -> None:
    """Save the latest weights under a new name of the callback, in place of those that it has if it keeps one file."""
    counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
    metrics, version = {**trainer.callback_metrics, **counts}, 0
    path = callback.format_checkpoint_name(metrics)
    while callback.file_exists(path, trainer):  # of an earlier run
        version += 1
        path = callback.format_checkpoint_name(metrics, ver=version)
    replaced, callback.best_model_path = callback.best_model_path, path  # before, since the checkpoint has it
    trainer.save_checkpoint(path, callback.save_weights_only)
    resumed = Path(replaced).absolute() == Path(trainer.ckpt_path or "").absolute()
    if replaced and callback.save_top_k == 1 and not resumed and Path(replaced).parent == Path(path).parent:
        trainer.strategy.remove_checkpoint(replaced)
