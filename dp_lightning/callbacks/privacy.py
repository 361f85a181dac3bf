"""Trains any LightningModule privately: the Lightning hooks of a `PrivateRun`.

One Lightning batch is one logical step (``logical_batches``), which the strategy's methods take (``strategy_methods``).
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from dp_lightning.errors import ConfigurationError
from dp_lightning.models.batch_norm import change_batch_norm, warn_without_statistics
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.record import RunRecord
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.resume import PRIVATE_RUN, RunHistory, SavedRun, require_counted_steps
from dp_lightning.private_run.run import PrivateRun
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.strategy_methods import StrategyMethods
from dp_lightning.private_run.trainer_checks import check_settings
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


class PrivacyCallback(PrivacySettings, pl.Callback):
    """Differentially private training on a plain Trainer.

    Its arguments are those of `PrivacySettings`. The number of logical steps T comes from the trainer: ``max_steps``,
    or that of ``max_epochs`` epochs of max(1, round(N / B)) steps. Journal and statement go into the folder of the run
    (`folder_of_run`), which the end of the run prints.

    Raises:
        ConfigurationError: naming the setting and the fix; from the constructor, and when ``fit`` starts.
        ModelError: naming what of the module's code cannot be taken example by example.
        BudgetError: when a step would spend more than was planned. A fit from a checkpoint of a run whose steps are
            all taken raises nothing, and writes the statement.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history = RunHistory(RunRecord(unit=self.unit, reproducible=self.seed is not None))
        self._run: PrivateRun | None = None
        self._methods: StrategyMethods | None = None
        self._batch_norm = "none"

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
        """The public numbers of the run; None before the first fit."""
        return None if self._run is None else self._run.plan

    @property
    def ledger(self) -> Ledger:
        """The steps taken so far, those of earlier parts of the run included."""
        return self.history.ledger

    def statement(self) -> PrivacyStatement:
        """The privacy statement of the steps taken so far.

        Raises:
            ConfigurationError: before the first fit.
        """
        return self.private_run.statement()

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse settings that would break the guarantee, before any data is touched.

        Raises:
            ConfigurationError: naming the setting and the fix.
            ModelError: naming the module and the fix.
        """
        check_settings(trainer, pl_module)
        if self.num_train is not None:
            self.make_plan(self.shape_for(trainer, self.num_train))

    # The hooks, in the order in which Lightning calls them

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = PrivateCheckpointIO(self._before_save)
        if stage == "fit":
            self.check(trainer, pl_module)
            self._methods = StrategyMethods(
                trainer, expected_batch_size=self.expected_batch_size, num_train=self.num_train_of
            )
            self._methods.install()
        if not any(is_overridden(hook, pl_module) for hook in ("setup", "configure_model")):
            self.change_batch_norm(pl_module)  # the module has all of its layers
        elif self.batch_norm != "refuse":
            # The module has all of its layers then; weights of a checkpoint, averages and the optimizer come later.
            vars(pl_module)["configure_model"] = lambda: self._configure_model(pl_module)

    def _configure_model(self, pl_module: pl.LightningModule) -> None:
        del vars(pl_module)["configure_model"]
        pl_module.configure_model()
        self.change_batch_norm(pl_module)

    def change_batch_norm(self, pl_module: pl.LightningModule) -> None:
        """Do to the BatchNorm layers of a module what ``batch_norm`` says; a second call changes nothing."""
        self._batch_norm = change_batch_norm(pl_module, self.batch_norm) or self._batch_norm

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        fits, saved = trainer.state.fn == TrainerFn.FITTING, SavedRun.read(checkpoint)
        if fits:
            require_counted_steps(checkpoint, saved)
        # Evaluating an earlier checkpoint after a fit does not undo its steps.
        if saved is not None and (fits or self._run is None):
            self.history.load(saved, Path(str(trainer.ckpt_path)).parent)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.setup_data()
        if self._methods is None or self._methods.loader is None:
            raise ConfigurationError("trainer.limit_train_batches is 0: there is nothing to train.")
        if self.batch_norm == "freeze":
            warn_without_statistics(pl_module)
        self._run = PrivateRun(trainer, pl_module, self, self.history, self._methods.loader)
        self._run.batch_norm = self._batch_norm
        self._methods.take_step, self._methods.release = self._run.take_step, self._run.release
        self._run.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            print(self.private_run.overview(), flush=True)  # by now, other callbacks have named their post-processing
        self.private_run.training_starts()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.private_run.step_ends()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.evaluation_starts()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.epoch_ends()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self._run is not None or self.history.saved is not None:
            checkpoint[PRIVATE_RUN] = {}  # a checkpoint of weights alone has no such entry

    def _before_save(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Write the run into a checkpoint that is complete otherwise, and keep a journal in its folder."""
        if PRIVATE_RUN in checkpoint:
            if self._run is not None:
                self._run.complete(checkpoint)
            elif self.history.saved is not None:
                self.history.saved.write(checkpoint)  # the checkpoint is saved again as it was loaded
        if self.history.record.journal is not None:
            self.history.record.journal.add_folder(folder, self.history.ledger)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.private_run.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        vars(pl_module).pop("configure_model", None)
        if self._methods is not None:
            self._methods.remove()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
        if self._run is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._run.fails(exception)
        self._run.close()


def privacy_of(trainer: pl.Trainer) -> PrivacyCallback | None:
    """The trainer's ``PrivacyCallback``; None where it has none."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, PrivacyCallback)), None)


def private_run_of(trainer: pl.Trainer) -> PrivateRun:
    """The private fit of a trainer.

    Raises:
        ConfigurationError: where it has none.
    """
    if (privacy := privacy_of(trainer)) is None:
        raise ConfigurationError("A callback needs a private run: put PrivacyCallback before it in trainer.callbacks.")
    return privacy.private_run
