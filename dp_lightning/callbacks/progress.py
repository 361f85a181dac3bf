"""The progress bar of a private run: logical steps of T, and epsilon spent of epsilon allowed."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.lightning_internals import is_due


class PrivateProgressBar(TQDMProgressBar):
    """Shows logical steps, since the number of physical batches is random."""

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.unit = "step"
        return bar

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        privacy = privacy_of(trainer)
        if privacy is None or privacy.plan is None:
            return super().on_train_epoch_start(trainer, *args)
        if self.train_progress_bar.total != privacy.plan.num_steps:
            self.train_progress_bar.reset(privacy.plan.num_steps)
            self.train_progress_bar.initial = privacy.ledger.num_steps
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
        return None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        privacy = privacy_of(trainer)
        if privacy is None or privacy.plan is None:
            return super().on_train_batch_end(trainer, pl_module, *args)
        steps = privacy.ledger.num_steps
        if steps == self.train_progress_bar.n:
            return None
        self.train_progress_bar.n = steps
        if is_due(self, steps, privacy.plan.num_steps):
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            self.train_progress_bar.refresh()
        return None

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        privacy = privacy_of(trainer)
        if privacy is not None and privacy.plan is not None and privacy.plan.noise_multiplier > 0:
            allowed = privacy.target_epsilon or privacy.budget.planned
            metrics["epsilon at most"] = f"{privacy.budget.bound:.2f} of {allowed:.2f}"
        return metrics
