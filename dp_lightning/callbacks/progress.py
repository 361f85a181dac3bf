"""The progress bar of `dpl`: Lightning's own, with what a private fit spends.

Lightning's bar counts logical steps, since a batch of the training loader is one step. Only a terminal shows the bar,
which changes in place; a file or a pipe gets one line for each epoch, without the numbers that are named unprotected.
"""

import sys
import time

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from dp_lightning.callbacks.privacy import privacy_of


class PrivateProgressBar(TQDMProgressBar):
    """Adds to Lightning's bar a bound of epsilon and, within a long step, the physical batches that are done.

    The number of physical batches of a step is secret, since it tells how many examples were drawn: a terminal shows
    it, and no file gets it. Evaluations, and fits without a `PrivacyCallback`, have Lightning's bar as it is.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not sys.stdout.isatty():
            self.disable()

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics, privacy = super().get_metrics(trainer, pl_module), privacy_of(trainer)
        metrics.pop("v_num", None)  # the end of the run prints its folder
        bound = {} if privacy is None else {"epsilon": privacy.private_run.budget.bound}
        # A narrow terminal cuts off what comes last.
        return {**bound, **dict(sorted(metrics.items(), key=lambda item: "loss" in item[0]))}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.is_enabled and (privacy := privacy_of(trainer)) is not None:
            privacy.private_run.on_physical_batch.append(self._show_physical_batch)

    def _show_physical_batch(self, number: int, count: int) -> None:
        part = f", batch {number} of {count}" if number < count else ""
        self.train_progress_bar.set_description(f"Epoch {self.trainer.current_epoch}{part}", refresh=count > 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.is_global_zero and not sys.stdout.isatty():
            line = f"{time.strftime('%H:%M:%S')}  Epoch {trainer.current_epoch}, step {trainer.global_step}"
            for name, value in self.get_metrics(trainer, pl_module).items():
                name = "epsilon at most" if name == "epsilon" else name
                if not name.startswith("unprotected/"):
                    line += f", {name} {value:.4g}" if isinstance(value, float) else f", {name} {value}"
            print(line, flush=True)
