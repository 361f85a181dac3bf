"""A checkpoint of the last step, so that no run ends with a spent budget and without its weights."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.lightning_internals import save_latest


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
        if self._saved_at == trainer.global_step:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and _wants_latest(callback):
                save_latest(trainer, callback)


def _wants_latest(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 and (callback.monitor is None or not callback.best_model_path)
