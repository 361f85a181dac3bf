"""A checkpoint of the last step, so that no run ends with a spent budget and without its weights."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.lightning_internals import save_latest, saved_at


class LastCheckpoint(pl.Callback):
    """Lets each ``ModelCheckpoint`` that keeps the latest weights save those of the last step.

    With ``check_val_every_n_epoch`` above one, Lightning saves only after an evaluation: the steps after the last one
    would be spent in vain. A ``ModelCheckpoint`` with a ``monitor`` keeps the best weights, and is asked only if it has
    saved none; one with ``save_top_k: 0`` never.
    """

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or callback.save_top_k == 0:
                continue
            wanted = callback.monitor is None or not callback.best_model_path
            if wanted and saved_at(callback) != trainer.global_step:
                save_latest(callback, trainer)
