"""One private fit of a Trainer: from the agreement of its ranks to the statement that it leaves.

`PrivacyCallback` makes a `PrivateRun` when a fit starts and calls it from Lightning's hooks and from the methods that
it puts on the strategy. From then on everything that a fit needs, such as its plan and its private step, exists.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from dp_lightning.errors import BudgetError, ConfigurationError, ModelError
from dp_lightning.models.batch_norm import fixed_statistics, freeze_batch_norm
from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.journal import journal_name
from dp_lightning.privacy.plan import PrivacyPlan, error_of_noise
from dp_lightning.privacy.reading import Reading
from dp_lightning.privacy.record import note_earlier_training
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.privacy.step import PrivateStep
from dp_lightning.privacy.weights import digest_of
from dp_lightning.private_run.agreement import require_equal_replicas, require_same_data, require_same_settings
from dp_lightning.private_run.data_checks import (
    SHARED_PERSONS,
    check_hyperparameters,
    require_held_out,
    warn_of_shared_persons,
)
from dp_lightning.private_run.logical_batches import LogicalBatch, PhysicalLoader
from dp_lightning.private_run.loss_comparison import NAME, warn_of_changed_meaning
from dp_lightning.private_run.resume import RUNS, RunHistory, SavedRun, plan_of_fit
from dp_lightning.private_run.schedule_trial import try_schedules
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.step_logging import StepLogging
from dp_lightning.private_run.trainer_checks import check_optimizers
from dp_lightning.ranks import Ranks

# Epsilon by PRV costs a tenth of a second to a second, so a run computes its epsilon this many times.
_EPSILON_UPDATES = 20

# Of so many examples one has a gradient, where anything can be learned; a hinge may be at rest for a few.
_FEW = 8
_NOTHING_LEARNED = (
    "Nothing can be learned: the gradient of every example so far is {}. The step sees a batch of one example, which "
    "has no other rows to compare with: no pairs, triplets or negatives, and no standard deviation over rows. Use a "
    "loss that one example has by itself, such as cross-entropy; with privacy.augmult, the batch has several views of "
    "its example."
)


def folder_of_run(trainer: pl.Trainer, run: str) -> Path:
    """The folder of a run's files; every rank has to call it.

    It is Lightning's log folder where a logger of files, or Lightning's command line, gives each run its own. Otherwise
    it is the folder ``privacy_runs/version_N`` under the trainer's ``default_root_dir`` that has the journal of the
    run, or a new one with the first free N.

    Args:
        run: name of the run, on rank 0.
    """
    own = isinstance(trainer.logger, TensorBoardLogger | CSVLogger)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if own or any(isinstance(callback, SaveConfigCallback) for callback in callbacks):
        return Path(trainer.log_dir or trainer.default_root_dir)
    runs = Path(trainer.default_root_dir) / RUNS
    found = [path.parent for path in runs.glob(f"*/{journal_name(run)}")] if trainer.is_global_zero else [runs]
    number = 0
    while not found:
        with suppress(FileExistsError):
            (runs / f"version_{number}").mkdir(parents=True)
            found = [runs / f"version_{number}"]
        number += 1
    return Path(trainer.strategy.broadcast(str(found[0])))


def response_of(group: Mapping[str, Any], num_steps: int) -> list[float]:
    """What an optimizer adds of a gradient to the weights, in units of its rate, in the gradient's step and later."""
    decay = group.get("momentum") or group.get("betas", (0.0,))[0]
    return [float(decay) ** step for step in range(num_steps)]


def _over_steps(value: float, schedule: Schedule | None) -> str:
    """A number of the first steps, and that of the last ones where a schedule changes it."""
    changed = "" if schedule is None else f" to {value * schedule.final:.4g} ({schedule.shape})"
    return f"{value:.4g}{changed}"


class Budget:
    """Epsilon of a run's ledger, which grows with each step, now and later.

    Attributes:
        milestone: the number of steps up to which ``bound`` holds.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        self.plan, self.ledger, self.block = plan, ledger, ledger.num_steps
        self._known: dict[int, float] = {}  # by numbers of steps
        self.look_ahead()

    def look_ahead(self) -> None:
        """Let ``bound`` hold up to the next milestone."""
        interval = max(self.plan.num_steps // _EPSILON_UPDATES, 1)
        self.milestone = min(self.ledger.num_steps + interval, self.plan.num_steps)

    @property
    def bound(self) -> float:
        """Epsilon that is not exceeded before the ledger has ``milestone`` steps."""
        return self.at(self.milestone)

    def spent(self) -> float:
        """Epsilon of the steps in the ledger, by the plan's accountant."""
        return self.at(self.ledger.num_steps)

    def at(self, num_steps: int) -> float:
        """Epsilon once the ledger holds ``num_steps``, or of the steps in the ledger where it holds more."""
        plan, taken = self.plan, self.ledger.num_steps
        if (steps := max(num_steps, taken)) not in self._known:
            if plan.bands > 1:  # a round that has begun is in the ledger
                taken += -(taken - self.block) % plan.bands
            runs = [*self.ledger.spent, *plan.rounds(plan.noise_multiplier, taken, num_steps)]
            self._known[steps] = compose(runs, delta=plan.delta, accountant=plan.accountant)
        return self._known[steps]


class PrivateRun:
    """One fit of a trainer; every rank makes a `PrivateRun`.

    Attributes:
        history: the past of the run, whose ledger and journal record the steps of this fit.
        folder: folder of the run's files, such as its journal and its statement.
        plan: the public numbers of the run.
        step: the private mechanism.
        budget: epsilon of the steps that are taken, and of those to come.
        postprocessing: what acts on the privatized gradient, in words; other callbacks add to this list.
        batch_norm: what became of BatchNorm layers, in words.
        ends_at_once: whether the fit resumes a run that is at its end, and takes no step.
        response: what the weights get of a gradient in its own step and in those after it: the optimizer's momentum,
            which other callbacks filter.
        weights: returns the weights of which the statement speaks: those of the module, unless a callback averages.
        on_physical_batch: functions to be called after each physical batch, with the number of the batch in its step,
            from 1, and the number of batches of the step.
        without_gradient: number of examples so far on this rank; None once one had a gradient, where steps were taken
            before the fit, and where no example has to have a gradient.
        stop_requested: set on one rank to ask all of them to stop after a step.
        stopping: whether some rank asked before the last step.

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
        loader: DataLoader[Any],
    ) -> None:
        self.trainer, self.module, self.settings, self.history = trainer, module, settings, history
        self.postprocessing: list[str] = []
        self.batch_norm = "none"
        self.weights: Callable[[], Mapping[str, Any]] = module.state_dict
        self.on_physical_batch: list[Callable[[int, int], None]] = []
        self.stop_requested = self.stopping = False
        self._ranks, device = Ranks(trainer.global_rank, trainer.world_size), trainer.strategy.root_device
        shared = {f"privacy.{name}": value for name, value in settings.values.items()}
        shared |= {"trainer.max_epochs": trainer.max_epochs, "trainer.max_steps": trainer.max_steps}
        num_train = shared["number of training examples"] = settings.num_train_of(loader.dataset)
        require_same_settings(shared, self._ranks, device)
        self._owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
        self._note_earlier_training()
        self.folder = folder_of_run(trainer, history.record.run)
        resumes = history.open_journal(trainer, self.folder)
        check_hyperparameters(trainer, module, len(loader.dataset))  # type: ignore[arg-type]
        # A solver may round differently on another kind of processor, so the ranks take one plan.
        found = plan_of_fit(settings, settings.shape_for(trainer, num_train), history)
        self.plan, ends = self._ranks.of_rank_0(found)
        history.plan, self.ends_at_once = self.plan, resumes and ends
        self._logging = StepLogging(module)
        self._index = 0  # number of the step in its epoch
        self.without_gradient: int | None = None if history.ledger.num_steps else 0
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.step = self._private_step(loader)
        left = self.plan.num_steps - self.history.ledger.num_steps
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else [{}]
        self.response = response_of(groups[0], left if self.plan.bands > 1 else 1)
        self._physical = PhysicalLoader(loader, self.step)
        self.budget = Budget(self.plan, history.ledger)
        self._held_out: Any = None  # loaders of a validation
        self._first: int | None = None  # Lightning's count when training starts
        # Steps in the ledger before the fit, and at the last statement; a fit without a step to take writes one too.
        self._before = history.ledger.num_steps
        self._stated = -1 if self.ends_at_once else history.ledger.num_steps

    # Before the first step

    def _note_earlier_training(self) -> None:
        """Record what trained the weights before this run; its private steps count in the ledger."""
        history, settings = self.history, self.settings
        if history.saved is not None:
            settings.require_same(history.saved.settings)
            if self.trainer.ckpt_path is not None:  # the weights are the checkpoint's
                return
        note_earlier_training(
            self.module,
            history.record,
            other_data=settings.earlier_training == "other_data",
            files=[file for owner in self._owners if (file := getattr(owner, "weights_file", None)) is not None],
        )

    def _private_step(self, loader: DataLoader[Any]) -> PrivateStep:
        if any(is_overridden("transfer_batch_to_device", owner) for owner in self._owners):
            raise ConfigurationError(
                "transfer_batch_to_device is overridden: it would see several examples at once. Move its work to "
                "on_after_batch_transfer, which runs on one example inside of the step."
            )
        settings = self.settings
        return PrivateStep(
            self.module,
            self._loss,
            loader.dataset,
            plan=self.plan,
            clip_plan=settings.clip_plan,
            reading=Reading(
                collate_fn=loader.collate_fn,
                augmult=settings.augmult,
                images_per_group=settings.images_per_group,
                prepare=self._transfer_hook("before"),
            ),
            examples=settings.examples,
            max_physical_batch_size=settings.max_physical_batch_size,
            disk=settings.disk,
            frozen_until=settings.frozen_until or {},
            record=self.history.record,
            ranks=self._ranks,
            seed=settings.seed,
        )

    def start(self) -> None:
        """Take up the steps that a checkpoint has; `close` has to follow.

        Raises:
            ConfigurationError: for an optimizer that cannot take private steps.
            BudgetError: when no step is left.
        """
        check_optimizers(self.trainer, self.step.parameters.values())
        self.history.unprotected.check(self.trainer)
        if self.history.saved is not None:
            self.step.load_state_dict(dict(self.history.saved.step))
        self.history.saved = None
        if self.ends_at_once:
            self.trainer.should_stop = True
            self.trainer.print(
                f"All {self.history.ledger.num_steps} steps of the plan are taken: this fit writes the statement. "
                "Evaluate the checkpoint by trainer.validate or dpl validate."
            )
        else:
            self.step.require_budget()
            spent, target = self.budget.at(self.plan.num_steps), self.plan.target_epsilon
            if target is not None and spent > target:
                raise BudgetError(
                    f"The steps taken and the steps planned would spend epsilon {spent:.3f}, above "
                    f"privacy.target_epsilon {target:g}. Plan fewer steps, or raise the target."
                )

    def training_starts(self) -> None:
        """Try the schedules, compare the ranks' data, and warn if a batch's loss is not the mean over its examples."""
        disk, reader = self.settings.disk, self.step.reader
        self.step.choose_noise(self.response)
        if disk is not None and not self.postprocessing:  # PostProcessCallback looks at the filter itself
            raise ConfigurationError(
                f"privacy.disk needs its filter: put Kalman with gain {disk.gain:g} and applies_to: all first "
                "into the transforms of PostProcessCallback."
            )
        try_schedules(self.trainer, self.module, self.plan.num_steps - self.history.ledger.num_steps)
        self._first = self.trainer.global_step
        self._log_epsilon()
        self.evaluation_starts()
        if warn_of_shared_persons(reader.dataset, self.trainer.val_dataloaders):
            self.history.unprotected.names.add(SHARED_PERSONS)
        require_same_data(reader.dataset, self._ranks, self.trainer.strategy.root_device)
        if warn_of_changed_meaning(self.trainer, self.module, reader):  # by all ranks: a step may wait for the others
            self.history.unprotected.names.add(NAME)

    def overview(self) -> str:
        """Method, plan and devices of the run, and what is special about it: a few lines of text for its start."""
        settings, trainer, plan, clip = self.settings, self.trainer, self.plan, self.settings.clip_plan
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
        method = "; ".join([f"DP-SGD by {optimizers}", *self.postprocessing])
        views = f", {settings.augmult} views of each example" if settings.augmult > 1 else ""
        quantile = f", then the {clip.adaptive.quantile:g} quantile of norms" if clip.adaptive is not None else ""
        epsilon = plan.target_epsilon or self.budget.at(plan.num_steps)
        budget = f"epsilon {epsilon:.4g} at delta {plan.delta:g} by {plan.accountant.upper()}, N {plan.num_train:,} "
        budget += f"{'persons' if settings.images_per_group else 'examples'}, B {plan.expected_batch_size:,}, sigma "
        budget += f"{_over_steps(plan.noise_multiplier, plan.noise_schedule)}, C "
        norm = clip.max_grad_norm if clip.adaptive is None else self.step.max_grad_norm
        budget += f"{_over_steps(norm, clip.schedule)}{quantile}, T {plan.num_steps:,} steps"
        rows = [
            ("method", f"{method}; {clip.kind.replace('_', ' ')} clipping ({clip.factor}){views}"),
            ("plan", budget),
            *([("noise", self._correlation())] if settings.bands != 1 and plan.noise_multiplier > 0 else []),
            ("epochs", f"{math.ceil(plan.num_steps / trainer.num_training_batches):,}"),
            ("device", f"{trainer.world_size} x {trainer.strategy.root_device.type}, precision {trainer.precision}"),
            *(("note", note) for note in self._notes()),
        ]
        return "\n".join(f"{label:<13}{text}" for label, text in rows)

    def _correlation(self) -> str:
        """What correlated noise gains, and the memory that it takes."""
        plan = self.plan
        if plan.bands == 1:
            return "independent: correlated over steps it would leave no smaller error"
        share = error_of_noise(plan, plan.target_epsilon or plan.epsilon("rdp"))
        kept = 4 * (plan.bands - 1) * sum(parameter.numel() for parameter in self.step.parameters.values())
        return (
            f"correlated over {plan.bands} steps, which leaves {share:.2f} of the error of independent noise in a sum "
            f"of gradients. The first process keeps {math.ceil(kept / 2**20):,} MiB of it"
        )

    def _notes(self) -> list[str]:
        """What was trained before the run, what is frozen in it, and what keeps it from release."""
        steps, record, settings, notes = self.history.ledger.num_steps, self.history.record, self.settings, []
        if steps:
            notes.append(f"{steps} of the steps are taken, with epsilon {self.budget.spent():.3f}.")
            if self.plan.bands > 1:
                notes[0] += " Correlated noise begins anew: a round that was cut short counts whole, within the target."
        earlier = {name: sum(count for _, _, count in runs) for name, runs in record.ledger.earlier.items()}
        counted = [f"run {name}: {count} private steps, which count here" for name, count in earlier.items()]
        if before := [*counted, *record.earlier_training]:
            notes.append(f"Training before the run: {'; '.join(before)}.")
        if phases := self.step.phases.describe():
            notes.append(f"Parameters: {phases} (privacy.frozen_until).")
        if fixed := fixed_statistics(self.module):
            notes.append(
                f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee "
                "and have to come from public data."
            )
        elif self.batch_norm != "none":
            load = "A script that loads the weights calls batch_norm_to_group_norm(self) last in __init__."
            notes.append(f"{self.batch_norm} (privacy.batch_norm). {load}")
        if self.plan.noise_multiplier == 0:
            notes.append("No noise is added: this run is NOT PRIVATE.")
        elif reasons := [*sorted(record.faults), *(["it is reproducible"] if settings.reproducible else [])]:
            notes.append(f"This run is NOT FOR RELEASE: {'; '.join(reasons)}.")
        return notes

    # One logical step

    def take_step(self, batch: LogicalBatch) -> None:
        """Add up the clipped gradients of a step's physical batches, and log what ``training_step`` logs."""
        self._index = int(batch.step)
        if self.settings.clip_schedule or self.settings.adaptive_clipping:
            self.module.log("privacy/max_grad_norm", self.step.max_grad_norm)
        if self.settings.batch_norm == "freeze":  # module.train() of a hook has undone it
            freeze_batch_norm(self.module)
        with self._logging.logical_batch():
            for physical in self._physical.next_step(int(self.trainer.num_training_batches) - self._index):
                with self._logging.physical_batch(physical.counted):
                    self.step.accumulate(physical)
                if self.without_gradient is not None:
                    self.without_gradient += int(physical.counted.sum())
                for tell in self.on_physical_batch:
                    tell(physical.place.piece + 1, physical.place.pieces)

    def release(self) -> None:
        """Put the privatized gradient into ``.grad``, before the hooks of any callback."""
        self.history.unprotected.non_finite += self.step.discarded
        self._require_gradients()
        self.stopping = self.step.release(stop=self.stop_requested)

    def _require_gradients(self) -> None:
        """Refuse first steps in which no example, on any rank, has a gradient; after the first one it looks no more.

        Raises:
            ModelError: where the gradient of every example is zero or not finite.
        """
        if self.without_gradient is None:
            return
        discarded = self.step.discarded
        counted = torch.full_like(discarded, self.without_gradient)
        found = torch.stack([counted, discarded, self.step.has_gradient.long()])
        self._ranks.add_up(found)
        examples, not_finite, learns = found.tolist()
        if learns:
            self.without_gradient = None
        elif examples >= _FEW:
            raise ModelError(_NOTHING_LEARNED.format("NaN, infinite or zero" if not_finite else "zero"))

    def _loss(self, batch: Any) -> Any:
        """The loss of the module's ``training_step`` on a batch of one example."""
        self._logging.begin_example()
        batch = self.trainer.precision_plugin.convert_input(batch)
        if (hook := self._transfer_hook("after")) is not None:
            batch = hook(batch)
        output = self.module.training_step(batch, *([self._index] if self._takes_index else []))
        return output.get("loss") if isinstance(output, Mapping) else output

    def _transfer_hook(self, time: Literal["before", "after"]) -> Callable[[Any], Any] | None:
        """The user's ``on_<time>_batch_transfer``: that of the data module, where both have one."""
        name = f"on_{time}_batch_transfer"
        owner = next((owner for owner in reversed(self._owners) if is_overridden(name, owner)), None)
        return None if owner is None else lambda batch: getattr(owner, name)(batch, 0)

    def step_ends(self) -> None:
        """Stop after the last step of the plan, and log epsilon at its milestones."""
        steps = self.history.ledger.num_steps
        self.history.unprotected.note_logged(self.trainer)
        if steps >= self.plan.num_steps:
            self.trainer.should_stop = True  # where a crash has lost steps, Lightning would go on
        if steps >= self.budget.milestone:
            self._log_epsilon()
            self.budget.look_ahead()

    def _log_epsilon(self) -> None:
        """A point of the loggers' curve over the steps in the weights: at the start, and at each milestone."""
        if self.trainer.loggers and math.isfinite(spent := self.budget.spent()):
            for logger in self.trainer.loggers:
                logger.log_metrics({"privacy/epsilon": spent}, step=self.trainer.global_step)
                logger.save()

    def epoch_ends(self) -> None:
        """Report what was not finite, and require the same model on every rank."""
        self.history.unprotected.report_non_finite(self.trainer, self.module)
        self.history.unprotected.note_logged(self.trainer)
        require_equal_replicas(self.module, self._ranks)

    def evaluation_starts(self) -> None:
        """Require that a validation within a fit is about held-out records; the same loaders are looked at once."""
        loaders = self.trainer.val_dataloaders
        if self.trainer.state.fn == TrainerFn.FITTING and loaders is not self._held_out:
            require_held_out(self.step.reader.dataset, loaders)
            self._held_out = loaders

    # Checkpoints and the end

    @property
    def _in_weights(self) -> int:
        """Number of steps of the ledger that the weights have."""
        return self.history.in_weights + (0 if self._first is None else self.trainer.global_step - self._first)

    def fails(self, error: BaseException) -> None:
        """Note an error, which makes the run unfit for release; an interruption and a spent budget do not."""
        took_steps = self.history.ledger.num_steps > self._before
        if took_steps and isinstance(error, Exception) and not isinstance(error, BudgetError):
            self.history.record.faults.add(f"the run ended by an error ({type(error).__name__})")

    def close(self) -> None:
        """On rank 0, write the privacy statement and print it, unless no step was taken; then end the workers."""
        self._before = self.history.ledger.num_steps  # what a later fit is refused for is no fault of this one
        self.history.in_weights = self._in_weights
        self._first = None if self._first is None else self.trainer.global_step
        if self.trainer.is_global_zero and self.history.ledger.num_steps != self._stated:
            self._stated = self.history.ledger.num_steps
            statement = self.statement()
            statement.write(self.folder)
            print(f"\n{statement.short()}\nResults: {self.folder}", flush=True)
        self._physical.close()

    def statement(self, weights: Mapping[str, Any] | None = None) -> PrivacyStatement:
        """The privacy statement of the steps taken so far, about these weights; None for those of ``weights``."""
        history = self.history
        # The module's own hook at the end of an epoch comes after that of PrivacyCallback.
        history.unprotected.note_logged(self.trainer)
        return self.step.statement(
            unprotected=tuple(sorted(history.unprotected.names)),
            postprocessing=", then ".join(self.postprocessing) or "none",
            batch_norm=self.batch_norm,
            lost_steps=history.ledger.num_steps - self._in_weights,
            weights=digest_of(self.weights() if weights is None else weights),
        )

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Write the run into a checkpoint that is about to be written, on rank 0, so that a fit can resume it."""
        statement = self.statement(checkpoint["state_dict"])
        SavedRun(statement=statement, settings=self.settings.values, step=self.step.state_dict()).write(checkpoint)
