"""One private fit of a Trainer: from the agreement of its ranks to the statement that it leaves.

`PrivacyCallback` makes a `PrivateRun` when a fit starts and calls it from Lightning's hooks. From then on everything
that a fit needs, such as its plan and its private step, exists.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_lightning.errors import BudgetError, ConfigurationError, ModelError
from dp_lightning.lightning_internals import average_of, begin_after_epochs
from dp_lightning.models.batch_norm import fixed_statistics
from dp_lightning.privacy.lineage import Origin, origin_of
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.sampling import Key, epoch_of, sampling_key
from dp_lightning.privacy.statement import PrivacyStatement, installed
from dp_lightning.privacy.step import PrivateStep
from dp_lightning.privacy.weights import digest_of
from dp_lightning.private_run.agreement import (
    require_equal_replicas,
    require_one_checkpoint,
    require_same_data,
    require_same_settings,
)
from dp_lightning.private_run.budget import Budget
from dp_lightning.private_run.finished_run import finish_instead_of_training, train_again
from dp_lightning.private_run.freed_memory import keep_freed_memory
from dp_lightning.private_run.held_out import require_held_out
from dp_lightning.private_run.hyperparameters import check_hyperparameters
from dp_lightning.private_run.loader import PrivateSource, require_private_loader, warn_of_equal_views
from dp_lightning.private_run.loss_comparison import NAME, warn_of_changed_meaning
from dp_lightning.private_run.person_warnings import warn_of_evaluated_persons, warn_of_persons
from dp_lightning.private_run.resume import RunHistory, SavedRun, plan_of_fit
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.slow_precision import warn_of_slow_precision
from dp_lightning.private_run.trainer_checks import check_optimizers, check_validation
from dp_lightning.private_run.training_step import PrivateTrainingStep, SealedBatch, is_no_state, names_of_libraries
from dp_lightning.private_run.withheld_metrics import give_back, withhold
from dp_lightning.strategies.private import trainer_ranks

# Lightning divides the loss by it; a power of two is undone without rounding.
_ACCUMULATE = 2**30


class PrivateRun:
    """One fit.

    Args:
        trainer: about to fit; every rank makes its run.
        module: to train.
        settings: of the user.
        history: what the run has behind it; its ledger and journal record the steps of this fit.
        source: of the training loader.
        say: prints the plan at the start and the statement when it is written.

    Attributes:
        plan: the public numbers.
        step: the private mechanism.
        budget: what is spent, and will be.
        postprocessing: what acts on the privatized gradient, in words; other callbacks add to it.
        stop_requested: set on one rank to ask all of them to stop after a step.
        stopping: whether some rank asked before the last step.
        written: the last statement of this fit; None before it, and on all ranks but the first.

    Raises:
        ConfigurationError, ModelError, DataError: naming what cannot be trained privately.
        BudgetError: when nothing is left to spend.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        settings: PrivacySettings,
        history: RunHistory,
        source: PrivateSource,
        say: Callable[[str], None],
    ) -> None:
        self.trainer, self.module, self.settings, self.history = trainer, module, settings, history
        self._say = say
        # Asked now and by every rank: Lightning asks rank 0 for it, which may be alone at the end.
        self.folder = Path(trainer.log_dir or trainer.default_root_dir)
        self.postprocessing: list[str] = []
        self.stop_requested = self.stopping = False
        self._held_out: Any = None  # loaders of the validation that have been looked at
        self._ranks = trainer_ranks(trainer)
        require_one_checkpoint(trainer, self._ranks)
        length = {"trainer.max_epochs": trainer.max_epochs, "trainer.max_steps": trainer.max_steps}
        require_same_settings({**settings.of_all_ranks, **length}, self._ranks, trainer.strategy.root_device)
        loader = source.users  # the user's code, after which it is asked what has trained the weights
        history.origin = self._origin()
        resumes = history.open_journal(trainer, self.folder)
        num_train = source.num_train(settings)
        require_same_settings({"number of training examples": num_train}, self._ranks, trainer.strategy.root_device)
        check_hyperparameters(trainer, module, len(loader.dataset))  # type: ignore[arg-type]
        self.plan, key, self._finishes = self._agree_on_plan(num_train, resumes=resumes)
        self._training_step = PrivateTrainingStep(trainer, module)
        self._training_step.require_no_trainer()
        self.step = self._private_step(loader, key)
        self.budget = Budget(self.plan, history.ledger)
        self._source = source
        # Steps before the fit, before the logical batch, and at the last statement. That of a fit without a step is
        # still to come.
        self._before = self._steps_before = history.ledger.num_steps
        self._stated = -1 if self._finishes else history.ledger.num_steps
        self.written: PrivacyStatement | None = None

    # Before the first step

    def _origin(self) -> Origin:
        """What trained the weights before this run; its private steps count in the ledger."""
        history, settings = self.history, self.settings
        if history.saved is not None:
            settings.require_same(dict(history.saved.settings))
            if self.trainer.ckpt_path is not None:  # the weights are the checkpoint's
                return history.origin
        owners = self.module, getattr(self.trainer, "datamodule", None)
        found = origin_of(
            self.module,
            history.ledger,
            run=history.run,
            unit=settings.unit,
            other_data=settings.earlier_training == "other_data",
            files=[file for owner in owners if (file := getattr(owner, "weights_file", None)) is not None],
        )
        before = history.origin
        return Origin(
            words=list(dict.fromkeys([*before.words, *found.words])),
            faults=list(dict.fromkeys([*before.faults, *found.faults])),
        )

    def _agree_on_plan(self, num_train: int, *, resumes: bool) -> tuple[PrivacyPlan, Key, bool]:
        """The plan and the sampling key of rank 0, and whether its steps are all taken.

        A solver may round differently on another kind of processor.
        """
        trainer, history, settings = self.trainer, self.history, self.settings
        plan, kept = plan_of_fit(settings, settings.shape_for(trainer, num_train), history)
        finishes = resumes and kept and history.ledger.num_steps >= plan.num_steps
        plan, key, finishes = trainer.strategy.broadcast((plan, sampling_key(settings.seed), finishes))
        history.plan = plan
        return plan, key, finishes

    def _private_step(self, loader: DataLoader[Any], key: Key) -> PrivateStep:
        settings, history, training_step = self.settings, self.history, self._training_step
        return PrivateStep(
            self.module,
            training_step.loss,
            loader.dataset,
            plan=self.plan,
            clip_plan=settings.clip_plan,
            collate_fn=loader.collate_fn,
            examples=settings.examples,
            max_physical_batch_size=settings.max_physical_batch_size,
            constant_shapes=settings.constant_shapes,
            augmult=settings.augmult,
            images_per_group=settings.images_per_group,
            disk=settings.disk,
            frozen_until=settings.frozen_until or {},
            ledger=history.ledger,
            journal=history.journal,
            run=history.run,
            origin=history.origin,
            ranks=self._ranks,
            sampling_key=key,
            seed=settings.seed,
            prepare=training_step.prepare,
            ignored=is_no_state,
            by_identity=names_of_libraries,
            raw=(
                loader,
                getattr(self.trainer, "datamodule", None),
                *training_step.data_sets(),
                training_step.metric_states(),
            ),
            also=training_step.also,
        )

    def start(self) -> None:
        """Replace the module's training step and the trainer's loader; `close` has to follow.

        Raises:
            ConfigurationError: for an optimizer that cannot take private steps.
            BudgetError: when the steps that are left cost too much.
        """
        check_optimizers(self.trainer, self.step.parameters.values())
        warn_of_slow_precision(self.trainer.precision, self.trainer.strategy.root_device)
        if not self._finishes:
            self._count_epochs()
        self._training_step.take_place(self.step)
        self._source.private = self.step
        withhold(self.trainer)
        if self.history.saved is not None:
            self.step.load_state_dict(dict(self.history.saved.step))
        self.history.saved = None
        if self._finishes:
            finish_instead_of_training(self.trainer, self.history.ledger.num_steps)
        else:
            self.step.require_budget()
            self.budget.require_affordable()
        self._say(self.budget.announcement(self.settings.clip_plan, reproducible=self.settings.reproducible))
        if phases := self.step.phases.describe():
            origin = "; ".join(self.history.origin.words) or "no file and no training that is known"
            self._say(f"Parameters: {phases} (privacy.frozen_until). Weights at the start: {origin}.")
        if fixed := fixed_statistics(self.module):
            self.trainer.print(
                f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee "
                "and have to come from public data."
            )

    def _count_epochs(self) -> None:
        """Let Lightning count the epochs of the plan.

        It takes an epoch that a setting or a callback has cut for a whole one, and a resumed run would end before its
        plan.
        """
        plan, steps = self.plan, self.history.ledger.num_steps
        whole, start = epoch_of(steps, num_train=plan.num_train, expected_batch_size=plan.expected_batch_size)
        begin_after_epochs(self.trainer, whole, steps=steps - start)

    def training_starts(self) -> None:
        """Compare the ranks' data, take secret keys, and warn if a batch's loss is not the mean over its examples."""
        disk, reader = self.settings.disk, self.step.reader
        if disk is not None and not self.postprocessing:  # PostProcessCallback looks at the filter itself
            raise ConfigurationError(
                f"privacy.disk needs its filter: put Kalman with gain {disk.gain:g} and applies_to: all first "
                "into the transforms of PostProcessCallback."
            )
        self._log_epsilon()
        if self._finishes:
            return
        check_validation(self.trainer)
        require_private_loader(self.trainer, self.step)
        self._require_held_out()
        require_same_data(reader.dataset, self._ranks, self.trainer.strategy.root_device)
        # Before anything runs on examples, so that nothing made from them counts as a constant.
        self.step.start()
        if self.settings.augmult > 1 and not self._training_step.has_transfer_hooks:
            warn_of_equal_views(reader.dataset)
        if self.settings.images_per_group is None:
            warn_of_persons(reader.dataset)
        if self.trainer.is_global_zero and warn_of_changed_meaning(
            self.trainer, self.module, reader.dataset, reader.collate_fn
        ):
            self.history.unprotected.names.add(NAME)
        # From here on alone: what was computed only once, such as a copy of the module, has been given back.
        if self.settings.keep_freed_memory and self.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()

    # One logical step

    def batch_starts(self, batch: Any) -> None:
        """Lightning steps after the last physical batch of a logical one, and accumulates before it."""
        if not isinstance(batch, SealedBatch):
            raise ConfigurationError(
                f"The training loader hands out {type(batch).__name__} and not the batches of the private step. "
                "Remove callbacks that replace loaders."
            )
        place = self._training_step.batch.place
        if place.piece == 0:
            self._steps_before = self.history.ledger.num_steps
        self.trainer.accumulate_grad_batches = 1 if place.last else _ACCUMULATE

    @property
    def piece(self) -> tuple[int, int]:
        """Number of the physical batch in its logical one, from 1, and how many that has; both follow from the draw."""
        place = self._training_step.batch.place
        return place.piece + 1, place.pieces

    def release(self, optimizer: Optimizer) -> None:
        """Put the privatized gradient into ``.grad``, before the hooks of any other callback."""
        _require_no_others(optimizer, self.module, self.step.parameters.values())
        self.history.unprotected.add_non_finite(self.step.discarded)
        self.stopping = self.step.release(stop=self.stop_requested)

    def batch_ends(self) -> None:
        """Check, after the last physical batch, that the ledger has one more step."""
        self.history.unprotected.note_logged(self.trainer)
        if self.trainer.accumulate_grad_batches != 1:
            return
        steps = self.history.ledger.num_steps
        if steps != self._steps_before + 1:
            raise ModelError(
                "A logical batch ended without an optimizer step. Do not skip steps in optimizer_step: each one is "
                "in the plan, and skipping changes what the ledger says."
            )
        if steps >= self.plan.num_steps:
            # Lightning then evaluates, in the middle of an epoch too. It would go on by itself if a crash lost steps.
            self.trainer.should_stop = True
        if steps == self.budget.milestone:
            self._log_epsilon()
            # For callbacks alone: Lightning gives loggers what is logged at their own steps, and again at later ones.
            spent = self.budget.spent()
            self.module.log("privacy/epsilon", spent, on_step=True, on_epoch=False, logger=False, batch_size=1)
            self.budget.look_ahead()

    def _log_epsilon(self) -> None:
        """A point of the loggers' curve over the steps in the weights: at the start, and at each milestone."""
        spent = self.budget.spent()
        if math.isfinite(spent):
            for logger in self.trainer.loggers:
                logger.log_metrics({"privacy/epsilon": spent}, step=self.trainer.global_step)
                logger.save()

    def epoch_ends(self) -> None:
        """Ranks compare their models; an epoch that was cut is refused, unless the run ends."""
        trainer, plan, steps = self.trainer, self.plan, self.history.ledger.num_steps
        ends = trainer.should_stop or trainer.global_step == trainer.max_steps or steps == plan.num_steps
        _, start = epoch_of(steps, num_train=plan.num_train, expected_batch_size=plan.expected_batch_size)
        if steps != start and not ends:
            raise ModelError(
                f"An epoch ended after {steps - start} of its steps, as where on_train_batch_start returns -1. Each "
                "step is in the plan: do not skip any. To end the run early, set trainer.should_stop."
            )
        self.history.unprotected.report_non_finite(self.trainer, self.module)
        self.history.unprotected.note_logged(self.trainer)
        require_equal_replicas(self.module, self._ranks)

    def evaluation_starts(self) -> None:
        """A validation during the fit may change state of the module, and no step may depend on it."""
        if (groups := self.step.reader.groups) is not None:
            warn_of_evaluated_persons(groups.ids, self.trainer, "val")
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._require_held_out()
            self.step.isolation.require_untouched()

    def _require_held_out(self) -> None:
        """Lightning knows the loaders when the training starts, or where that is not needed, when a validation does."""
        loaders = self.trainer.val_dataloaders
        if loaders is not self._held_out:
            require_held_out(self.step.reader.dataset, loaders)
            self._held_out = loaders

    def evaluation_ends(self) -> None:
        """What a validation of the fit has changed is not state of a step."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.step.isolation.evaluated()

    # Checkpoints and the end

    def last_step_taken(self) -> None:
        """Training is over, and Lightning counts as it did."""
        self.history.unprotected.note_logged(self.trainer)
        self.trainer.accumulate_grad_batches = 1

    def training_ends(self) -> None:
        """An average of the weights that Lightning has put into the module is post-processing."""
        if average := average_of(self.trainer, self.module):
            self.postprocessing.append(average)
            self.step.stepped()

    def fails(self, error: BaseException) -> None:
        """Note an error, which makes the run unfit for release; an interruption and a spent budget do not."""
        if isinstance(error, Exception) and not isinstance(error, BudgetError):
            fault = f"the run ended by an error ({type(error).__name__})"
            self.step.faults.add(fault)
            known = fault in self.history.origin.faults
            if self.history.ledger.num_steps > self._before and not known:  # a later fit starts from these weights
                self.history.origin.faults.append(fault)

    def close(self) -> None:
        """Restore the module and the trainer, and write the statement."""
        self.step.later.look()
        if (error := self.step.later.error) is not None:
            self.fails(error)
        self._training_step.close()
        give_back(self.trainer)
        train_again(self.trainer)
        self.trainer.accumulate_grad_batches = 1
        if self.trainer.is_global_zero:
            self.leave_statement()

    def leave_statement(self) -> None:
        """Write the privacy statement to the log folder and show it, unless no step was taken."""
        if self.history.ledger.num_steps != self._stated:
            self._stated = self.history.ledger.num_steps
            self._write(self.statement())

    def _write(self, statement: PrivacyStatement) -> None:
        self.written = statement
        statement.write(self.folder)
        self._say(statement.short())

    def statement(self, **more: Any) -> PrivacyStatement:
        """The privacy statement of the steps taken so far.

        Args:
            more: fields that are known better than here.
        """
        history = self.history
        history.changed_outside.update(self.step.changed_outside)
        return self.step.statement(
            changed_outside=tuple(sorted(history.changed_outside)),
            unprotected=tuple(sorted(history.unprotected.names)),
            postprocessing=", then ".join(self.postprocessing) or "none",
            earlier_targets=tuple(history.earlier_targets),
            lost_steps=history.ledger.num_steps - self.trainer.global_step,
            versions={name: installed(name) for name in ("dp-lightning", "torch", "lightning", "opacus")},
            **more,
        )

    def note_copy(self) -> None:
        """A checkpoint is a copy of the weights, and may be chosen by what was logged since the last step."""
        # The module's own hook at the end of an epoch comes after that of PrivacyCallback.
        self.history.unprotected.note_logged(self.trainer)
        self.step.remember()

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Write the run into a checkpoint that a fit can resume.

        Args:
            checkpoint: about to be written, on rank 0.
        """
        statement = self.statement(weights=digest_of(checkpoint["state_dict"]))
        SavedRun(statement=statement, settings=self.settings.of_the_run, step=self.step.state_dict()).write(checkpoint)


def _require_no_others(optimizer: Optimizer, module: pl.LightningModule, trained: Iterable[Tensor]) -> None:
    """Refuse a gradient that is not one of the trained parameters'."""
    ids = {id(parameter) for parameter in trained}
    for group in optimizer.param_groups:
        for raw in group["params"]:
            if raw.grad is not None and id(raw) not in ids:
                names = (name for name, parameter in module.named_parameters() if parameter is raw)
                name = next(names, f"a parameter of shape {tuple(raw.shape)} that is not the module's")
                raise ModelError(
                    f"The optimizer holds {name}, which is not trained and has a raw gradient. Set its .grad to None, "
                    "or build the optimizer from the parameters that are trained."
                )
