"""Trains any LightningModule privately: the Lightning hooks of a `PrivateRun`.

One logical step: the loader gives physical batches of one Poisson draw. Instead of the module's ``training_step``,
Lightning calls ``PrivateStep.accumulate``, which runs it on each example separately, and gets a loss of zero. On the
last physical batch ``PrivateStep.release`` writes the privatized gradient into ``.grad``, before the hooks of any other
callback, and the optimizer steps. Lightning's counters see logical steps only, because
``trainer.accumulate_grad_batches`` is set to one on the last physical batch and to a very large number on the others.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.record import RunRecord
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.checkpoint_contents import check_hyperparameters, check_metrics
from dp_lightning.private_run.loader import PrivateSource
from dp_lightning.private_run.planned_counts import count_by_loader, count_by_plan
from dp_lightning.private_run.resume import PRIVATE_RUN, RunHistory, SavedRun, require_counted_steps
from dp_lightning.private_run.run import PrivateRun
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.trainer_checks import check_order, check_settings
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


class PrivacyCallback(PrivacySettings, pl.Callback):
    """Differentially private training on a plain Trainer.

    Its arguments are those of `PrivacySettings`. The number of logical steps T comes from the trainer: ``max_steps``,
    or floor(``max_epochs`` * N / B). The statement is written to the log directory.

    Raises:
        ConfigurationError: naming the setting and the fix; from the constructor, and when ``fit`` starts.
        ModelError: naming what of the module's code cannot be taken example by example.
        BudgetError: when a step would spend more than was planned. A fit from a checkpoint of a run whose steps are
            all taken is none: it evaluates, and writes the statement.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history = RunHistory(RunRecord(unit=self.unit, reproducible=self.seed is not None))
        #: Whether the plan and the statement are printed; a `Screen` shows them itself.
        self.announces = True
        self._run: PrivateRun | None = None
        self._plan: PrivacyPlan | None = None

    @property
    def private_run(self) -> PrivateRun:
        """The fit in progress, or the last one.

        Raises:
            ConfigurationError: before a fit.
        """
        if self._run is None:
            raise ConfigurationError("There is no private run before trainer.fit.")
        return self._run

    @property
    def plan(self) -> PrivacyPlan | None:
        """The public numbers of the run; None before they are known."""
        return self._plan if self._run is None else self._run.plan

    @property
    def run(self) -> str:
        """Name of the run; one that resumes keeps it."""
        return self.history.record.run

    @property
    def ledger(self) -> Ledger:
        """The steps taken so far, those of earlier parts of the run included."""
        return self.history.ledger

    def statement(self, **more: Any) -> PrivacyStatement:
        """The privacy statement of the steps taken so far.

        Args:
            more: fields that are known better than here.

        Raises:
            ConfigurationError: before the first fit.
        """
        return self.private_run.statement(**more)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse settings that would break the guarantee, before any data is touched; makes the plan where N is known.

        Raises:
            ConfigurationError: naming the setting and the fix.
            ModelError: naming the module and the fix.
        """
        check_settings(trainer, pl_module)
        check_order(trainer, self)
        check_hyperparameters(trainer, pl_module)
        check_metrics(pl_module)
        if self._run is None and self.num_train is not None:
            self._plan = self.make_plan(self.shape_for(trainer, self.num_train))

    # The hooks, in the order in which Lightning calls them

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check(trainer, pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = PrivateCheckpointIO(self._before_save)
        if stage == "fit":
            source = PrivateSource.stand_in(trainer)
            count_by_plan(trainer, lambda: self.shape_for(trainer, source.num_train(self)))

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        fits, saved = trainer.state.fn == TrainerFn.FITTING, SavedRun.read(checkpoint)
        if fits:
            require_counted_steps(trainer, checkpoint, saved)
        # Evaluating an earlier checkpoint after a fit does not undo its steps.
        if saved is not None and (fits or self._run is None):
            self.history.load(saved)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        say = trainer.print if self.announces else lambda text: None
        self._run = PrivateRun(trainer, pl_module, self, self.history, PrivateSource.of(trainer), say=say)
        self._run.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.training_starts()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        self.private_run.batch_starts(batch)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.private_run.release(optimizer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.private_run.batch_ends()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.evaluation_starts()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.evaluation_ends()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.epoch_ends()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self._run is not None:
            self._run.note_copy()
        if self._run is not None or self.history.saved is not None:
            checkpoint[PRIVATE_RUN] = {}  # a checkpoint of weights alone has none

    def _before_save(self, checkpoint: dict[str, Any], folder: Path) -> None:
        if self._run is not None:
            self._run.complete(checkpoint, whole=PRIVATE_RUN in checkpoint)
        elif self.history.saved is not None and PRIVATE_RUN in checkpoint:
            self.history.saved.write(checkpoint)  # saved again as it was loaded
        self.history.keep_journal_in(folder)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.last_step_taken()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.training_ends()
        self._close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._run is not None:
            self._run.fails(exception)
        try:
            self._close(trainer)
        except OSError as error:
            # The exception itself matters more, and the journal has the steps.
            rank_zero_warn(f"The privacy statement could not be written: {error}")

    def _close(self, trainer: pl.Trainer) -> None:
        count_by_loader(trainer)
        if self._run is not None:
            self._run.close()


def privacy_of(trainer: pl.Trainer) -> PrivacyCallback | None:
    """The trainer's ``PrivacyCallback``; None where it has none."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, PrivacyCallback)), None)
