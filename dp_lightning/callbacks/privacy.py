"""Trains any LightningModule privately: the Lightning hooks around one ``PrivateStep``.

The way of one logical step. The loader hands out physical batches of one Poisson draw. In the place of the module's
``training_step`` Lightning calls ``PrivateStep.accumulate``, which runs it on each example by itself, and gets a loss
of zero. On the last physical batch ``PrivateStep.release`` writes the privatized gradient into ``.grad``, before the
hooks of any other callback, and the optimizer steps. Lightning's counters see logical steps only, because
``trainer.accumulate_grad_batches`` is set to one on the last physical batch and to a very large number on the others.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_lightning.errors import BudgetError, ConfigurationError, ModelError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.lineage import Origin, origin_of
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.sampling import sampling_key
from dp_lightning.privacy.statement import ONE_EXAMPLE, ONE_PERSON, STATEMENT, PrivacyStatement, installed
from dp_lightning.privacy.step import PrivateStep, check_step_settings
from dp_lightning.private_run.agreement import require_equal_replicas, require_same_data, require_same_settings
from dp_lightning.private_run.budget import Budget
from dp_lightning.private_run.checkpoint_contents import (
    Settings,
    check_hyperparameters,
    check_metrics,
    cut_views,
    require_nothing_raw,
)
from dp_lightning.private_run.checkpoints import (
    count_logical_steps,
    require_counted_steps,
    require_one_checkpoint,
)
from dp_lightning.private_run.estimated_steps import estimate_by_loader, estimate_by_plan
from dp_lightning.private_run.finished_run import finish_instead_of_training, train_again
from dp_lightning.private_run.journal import RunJournal
from dp_lightning.private_run.loader import (
    PrivateSource,
    private_loader,
    require_private_loader,
    warn_of_equal_views,
)
from dp_lightning.private_run.loss_comparison import NAME, warn_of_changed_meaning
from dp_lightning.private_run.person_warnings import warn_of_evaluated_persons, warn_of_persons
from dp_lightning.private_run.trainer_checks import check_optimizers, check_order, check_settings
from dp_lightning.private_run.training_step import PrivateTrainingStep, SealedBatch, is_no_state
from dp_lightning.private_run.unprotected import Unprotected
from dp_lightning.private_run.withheld_metrics import give_back, withhold
from dp_lightning.ranks import Ranks
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO, broken_seal
from dp_lightning.strategies.private import trainer_ranks

# What earlier versions have not saved.
_STATE = {"run", "heads", "settings", "step", "unprotected", "changed_outside", "earlier_training", "faults"}
# Lightning divides the loss by it; a power of two is undone without rounding.
_ACCUMULATE = 2**30


class PrivacyCallback(pl.Callback):
    """Differentially private training on a plain Trainer.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given. The number of logical steps T comes from the
    trainer: ``max_steps``, or floor(``max_epochs`` * N / B). The statement is written to the log directory.

    Args:
        expected_batch_size: B, the mean number of examples in a logical batch.
        target_epsilon: the epsilon that the whole run may spend; the noise is solved for it.
        noise_multiplier: sigma, the noise's standard deviation over the sensitivity.
        delta: probability with which epsilon may be exceeded; below 1/N.
        max_grad_norm: C, the most that one example can contribute, in L2 norm.
        clipping: one norm over all parameters, or one per layer with C / sqrt(L) each.
        clip_factor: ``abadi`` min(1, C/norm), or ``automatic`` C/(norm + 0.01).
        examples: how ``training_step`` sees one example at a time. ``together``: all of a physical batch at once, under
            torch.func.vmap. ``one_by_one``: one after the other, slower, for code that vmap cannot run.
        max_physical_batch_size: most images that go through the model at once, every view of an example counted, and
            every image of a person. It bounds memory and changes nothing else.
        accountant: by which epsilon is planned and shown.
        num_train: N; None reads it from the training data set. A number that differs from the data set is refused.
        unit_of_privacy: what one neighbour adds or removes. ``example``: one element of the training set. ``group``:
            one person, all elements with the same id in the data set's ``groups``; N and B then count persons.
        images_per_group: how many images of a person are drawn for each step in which the person takes part; 1 without
            it. They are the rows of one example, whose gradient is clipped once.
        reproducible: fixes sampling, noise, dropout and augmentation by the seed of ``seed_everything`` (0 without
            one), and makes the run not fit for release.
        not_private: must be true to allow ``noise_multiplier: 0``.
        augmult: K, augmentation multiplicity (De et al. 2022): ``training_step`` sees K views of each example, drawn
            anew by the data set's transform, and the gradient of its loss is clipped once. It costs no privacy.
        disk: takes each example's gradient where DiSK does (Zhang et al. 2025); its filter is `Kalman` in the
            post-processing. None is the gradient at the parameters.
        earlier_training: on what the weights were trained before the run. ``same_data``: private steps that are known
            count in this run's epsilon, and steps without privacy in this process keep it from release. ``other_data``:
            on other people's data, or public data, by your word; the statement says so.

    Raises:
        ConfigurationError: naming the setting and the fix; from the constructor, and when ``fit`` starts.
        ModelError: naming what of the module's code cannot be taken example by example.
        BudgetError: when a step would spend more than was planned. A fit from a checkpoint of a run whose steps are
            all taken is none: it evaluates, and writes the statement.
    """

    def __init__(
        self,
        expected_batch_size: int,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        max_grad_norm: float = 1.0,
        clipping: Literal["flat", "per_layer"] = "flat",
        clip_factor: Literal["abadi", "automatic"] = "abadi",
        examples: Literal["together", "one_by_one"] = "together",
        max_physical_batch_size: int = 128,
        accountant: Literal["prv", "rdp", "pld"] = "prv",
        num_train: int | None = None,
        unit_of_privacy: Literal["example", "group"] = "example",
        images_per_group: int | None = None,
        reproducible: bool = False,
        not_private: bool = False,
        augmult: int = 1,
        disk: DiSK | None = None,
        earlier_training: Literal["same_data", "other_data"] = "same_data",
    ) -> None:
        super().__init__()
        self.budget = Budget(
            expected_batch_size=expected_batch_size,
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            accountant=accountant,
            not_private=not_private,
        )
        self.unit_of_privacy = unit_of_privacy
        self.images_per_group = _images_per_group(unit_of_privacy, images_per_group)
        check_step_settings(
            examples=examples,
            max_physical_batch_size=max_physical_batch_size,
            augmult=augmult,
            images_per_group=self.images_per_group,
        )
        self.examples, self.augmult, self.disk = examples, augmult, disk
        if earlier_training not in ("same_data", "other_data"):
            raise ConfigurationError(
                f"privacy.earlier_training is {earlier_training!r}; choose 'same_data' or 'other_data'."
            )
        self.earlier_training = earlier_training
        make = {"flat": ClipPlan.flat, "per_layer": ClipPlan.per_layer}
        if clipping not in make:
            raise ConfigurationError(f"privacy.clipping is {clipping!r}; choose 'flat' or 'per_layer'.")
        self.clip_plan = make[clipping](max_grad_norm=max_grad_norm, factor=clip_factor)
        self.max_physical_batch_size = max_physical_batch_size
        self.num_train, self.reproducible = num_train, reproducible
        self._users_loader: DataLoader[Any] | None = None
        self._private: PrivateStep | None = None
        self._training_step: PrivateTrainingStep | None = None
        self._steps_before = self._stated = 0
        self._folder = Path()
        self._record = RunJournal()
        self._ranks = Ranks()
        self._unprotected = Unprotected()
        self._hyperparameters: Settings = {}
        self._written: PrivacyStatement | None = None
        self._changed_outside: set[str] = set()
        self._restored: dict[str, Any] | None = None
        self._origin = Origin()
        self._finishes = self._evaluates = False
        #: What acts on the privatized gradient, in words; `PostProcessCallback` adds to it when ``fit`` starts.
        self.postprocessing: list[str] = []
        #: Set on one rank to ask all of them to stop after a step; and whether some rank asked before the last step.
        self.stop_requested, self.stopping = False, False

    # Before the first step

    @property
    def plan(self) -> PrivacyPlan | None:
        """The public numbers of the run; None before they are known."""
        return self.budget.plan

    @property
    def noise_level(self) -> float:
        """Standard deviation of the noise in each entry of the privatized gradient, sigma S / B, during a fit."""
        return self.private.noise_level

    @property
    def private(self) -> PrivateStep:
        """The private step of the fit.

        Raises:
            ConfigurationError: before a fit.
        """
        if self._private is None:
            raise ConfigurationError("There is no private step before trainer.fit.")
        return self._private

    @property
    def run(self) -> str:
        """Name of the run; one that goes on keeps it."""
        return self._record.run

    def count_steps_of(self, journal: Path) -> None:
        """Let the next fit go on with a run that has left a journal and no checkpoint.

        Its weights are lost and its steps are spent: they count in the ledger, and are missing in the new weights.

        Args:
            journal: of the run.
        """
        self._record.count_steps_of(journal)

    @property
    def ledger(self) -> Ledger:
        """The steps taken so far, those of earlier parts of the run included."""
        return self.budget.ledger

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
        if self.plan is None and self.num_train is not None:
            self.budget.make_plan(trainer, self.num_train)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check(trainer, pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = PrivateCheckpointIO(
                lambda checkpoint, folder: self._before_save(trainer, checkpoint, folder),
                # As the file has it, before the module's own hook may adapt it.
                lambda checkpoint: broken_seal(checkpoint) if trainer.state.fn == TrainerFn.FITTING else None,
            )
        if stage != "fit":
            return
        self._users_loader = self._training_step = None
        source = trainer.fit_loop._data_source
        if not isinstance(source, PrivateSource):
            trainer.fit_loop._data_source = PrivateSource(source, self._private_loader)
        estimate_by_plan(trainer, lambda: self._num_steps(trainer))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Asked now and by every rank: Lightning asks rank 0 for it, which may be alone at the end.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._ranks = trainer_ranks(trainer)
        self.stop_requested = self.stopping = False
        self.postprocessing = []
        self._written = None
        self._hyperparameters = check_hyperparameters(trainer, pl_module)  # setup may have saved more
        require_one_checkpoint(trainer, self._ranks)
        require_same_settings(self._settings(), self._ranks, trainer.strategy.root_device)
        loader = self._users(trainer)  # the user's code, after which it is asked what has trained the weights
        if self._restored is None:
            owners = pl_module, getattr(trainer, "datamodule", None)
            self._origin = origin_of(
                pl_module,
                self.ledger,
                run=self.run,
                unit=ONE_EXAMPLE if self.images_per_group is None else ONE_PERSON,
                other_data=self.earlier_training == "other_data",
                files=[file for owner in owners if (file := getattr(owner, "weights_file", None)) is not None],
            )
        goes_on = self._record.open(trainer, self._folder, self.ledger, restored=self._restored is not None)
        self._stated = self.ledger.num_steps
        if self._restored is not None:
            self._require_same(self._restored["settings"])
        more = bool(self.ledger.earlier) and not self.ledger.num_steps
        if self.plan is None or self._restored is not None or goes_on or more:
            earlier = None if self._restored is None else PrivacyPlan(**self._restored["plan"])
            self.budget.make_plan(trainer, self._count_examples(trainer), earlier=earlier)
        # One key for all ranks, and one plan: a solver may round differently on another kind of processor.
        finishes = goes_on and self.budget.is_finished
        self.budget.plan, key, self._finishes = trainer.strategy.broadcast(
            (self.plan, sampling_key(self._seed), finishes)
        )
        self._training_step = PrivateTrainingStep(trainer, pl_module)
        self._training_step.require_no_trainer()
        self._private = private = PrivateStep(
            pl_module,
            self._training_step.loss,
            loader.dataset,
            plan=self._known_plan,
            clip_plan=self.clip_plan,
            collate_fn=loader.collate_fn,
            examples=self.examples,
            max_physical_batch_size=self.max_physical_batch_size,
            augmult=self.augmult,
            images_per_group=self.images_per_group,
            disk=self.disk,
            ledger=self.ledger,
            journal=self._record.journal,
            run=self.run,
            origin=self._origin,
            ranks=self._ranks,
            sampling_key=key,
            seed=self._seed,
            prepare=self._training_step.prepare,
            ignored=is_no_state,
            raw=(loader, getattr(trainer, "datamodule", None), self._training_step.metric_states()),
            also=self._training_step.also,
        )
        self._training_step.take_place(private)
        withhold(trainer)
        check_optimizers(trainer, private.parameters.values())
        if self._restored is not None:
            private.load_state_dict(self._restored["step"])
        if self._finishes:
            self._stated, self.budget.planned = -1, self.budget.spent()  # the statement is still to be written
            finish_instead_of_training(trainer, self.ledger.num_steps)
        else:
            private.require_budget()
            self.budget.require_affordable()
        self.budget.look_ahead()
        trainer.print(self.budget.announcement(self.clip_plan, reproducible=self.reproducible))
        if fixed := fixed_statistics(pl_module):
            trainer.print(
                f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee "
                "and have to come from public data."
            )

    @property
    def _seed(self) -> int | None:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.reproducible else None

    @property
    def _known_plan(self) -> PrivacyPlan:
        if self.plan is None:
            raise ConfigurationError("There is no privacy plan before trainer.fit.")
        return self.plan

    @property
    def _kept_settings(self) -> dict[str, Any]:
        """What a run that resumes has to keep: its statement says it once for all steps."""
        clip = self.clip_plan
        return {
            "examples": self.examples,
            "augmult": self.augmult,
            "disk": None if self.disk is None else self.disk.gain,
            "seed": self._seed,
            "unit_of_privacy": self.unit_of_privacy,
            "images_per_group": self.images_per_group,
            "clipping": clip.kind,
            "clip_factor": clip.factor,
            "max_grad_norm": clip.max_grad_norm,
        }

    def _require_same(self, earlier: dict[str, Any]) -> None:
        now = self._kept_settings
        if differing := [name for name in now if earlier.get(name) != now[name]]:
            pairs = ((name, earlier.get(name), now[name]) for name in differing)
            differences = ", ".join(f"privacy.{name} {before}, and it is {after} now" for name, before, after in pairs)
            raise ConfigurationError(
                f"The checkpoint's run has {differences}: the statement could not say what the run clips. Set it to "
                "the run's value."
            )

    def _settings(self) -> dict[str, object]:
        """What ranks need to have in common; the plan and the sampling key come from rank 0."""
        return {
            "privacy.max_grad_norm, clipping or clip_factor": (self.clip_plan.describe(), self.clip_plan.sensitivity),
            "privacy.expected_batch_size": self.budget.expected_batch_size,
            "privacy.max_physical_batch_size": self.max_physical_batch_size,
            "privacy.examples, augmult, disk, unit_of_privacy, images_per_group or the seed of a reproducible run": (
                self._kept_settings
            ),
        }

    def _users(self, trainer: pl.Trainer) -> DataLoader[Any]:
        """The loader that the user wrote, asked for once in a fit."""
        if self._users_loader is None:
            source = trainer.fit_loop._data_source
            assert isinstance(source, PrivateSource)
            self._users_loader = source.users()
        return self._users_loader

    def _count_examples(self, trainer: pl.Trainer) -> int:
        if self.num_train is not None:
            return self.num_train
        dataset: Any = self._users(trainer).dataset
        return len(dataset if self.images_per_group is None else Groups(dataset, self.images_per_group))

    def _num_steps(self, trainer: pl.Trainer) -> int:
        """T, also in ``configure_optimizers``, which comes before ``on_fit_start`` makes the plan."""
        if self.plan is not None and (self._restored is None or self._training_step is not None):
            return self.plan.num_steps
        return self.budget.count_steps(trainer, self._count_examples(trainer))

    def _private_loader(self) -> DataLoader[Any]:
        if self._users_loader is None or self._training_step is None:
            raise ConfigurationError(
                "The private training loader is asked for before on_fit_start, as by fit_loop.setup_data() in "
                "configure_optimizers. For the number of steps read trainer.estimated_stepping_batches."
            )
        return private_loader(self._users_loader, self.private)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.disk is not None and not self.postprocessing:  # PostProcessCallback looks at the filter itself
            raise ConfigurationError(
                f"privacy.disk needs its filter: put Kalman with gain {self.disk.gain:g} and applies_to: all first "
                "into the transforms of PostProcessCallback."
            )
        if self._finishes:
            return
        require_private_loader(trainer, self.private)
        require_same_data(self.private.reader, self._ranks, trainer.strategy.root_device)
        # Before anything runs on examples, so that nothing made from them counts as a constant.
        self.private.start()
        assert self._training_step is not None
        if self.augmult > 1 and not self._training_step.has_transfer_hooks:
            warn_of_equal_views(self.private.reader.dataset)
        if self.images_per_group is None:
            warn_of_persons(self.private.reader.dataset)
        if trainer.is_global_zero and warn_of_changed_meaning(trainer, pl_module, self._training_step, self.private):
            self._unprotected.names.add(NAME)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._private is not None and (groups := self._private.reader.groups) is not None:
            warn_of_evaluated_persons(groups.ids, trainer, "val")
        if self._private is not None and trainer.state.fn == TrainerFn.FITTING:
            self._private.isolation.require_untouched()

    # One physical batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._training_step is not None
        if not isinstance(batch, SealedBatch):
            raise ConfigurationError(
                f"The training loader hands out {type(batch).__name__} and not the batches of the private step. Remove "
                "callbacks that exchange loaders."
            )
        place = self._training_step.batch.place
        if place.piece == 0:
            self._steps_before = self.ledger.num_steps
        trainer.accumulate_grad_batches = 1 if place.last else _ACCUMULATE

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        _require_no_others(optimizer, self.private.parameters.values())
        self._unprotected.add_non_finite(self.private.discarded)
        self.stopping = self.private.release(stop=self.stop_requested)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._unprotected.note_logged(trainer)
        self._changed_outside.update(self.private.changed_outside)
        if trainer.accumulate_grad_batches != 1:
            return
        steps = self.ledger.num_steps
        if steps != self._steps_before + 1:
            raise ModelError(
                "A logical batch ended without an optimizer step. Do not skip steps in optimizer_step: each one is "
                "in the plan, and skipping changes what the ledger says."
            )
        if steps == self.budget.milestone:
            pl_module.log("privacy/epsilon", self.budget.spent(), on_step=True, on_epoch=False, batch_size=1)
            self.budget.look_ahead()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unprotected.report_non_finite(trainer, pl_module)
        self._unprotected.note_logged(trainer)
        if self._private is not None:
            require_equal_replicas(pl_module, self._ranks)
        if self.plan is not None and self.ledger.num_steps >= self.plan.num_steps:
            # Where steps were lost in a crash, Lightning's own counters would go on without any.
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._private is not None:
            self._private.isolation.evaluated()

    # After the run

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unprotected.note_logged(trainer)
        trainer.accumulate_grad_batches = 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._private is not None and (average := _average_in(trainer, pl_module)):
            self.postprocessing.append(average)
            self._private.stepped()
        self._close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._private is not None and isinstance(exception, Exception) and not isinstance(exception, BudgetError):
            self._private.faults.add(f"the run ended by an error ({type(exception).__name__})")
        try:
            self._close(trainer)
        except OSError as error:
            # The exception itself matters more, and the journal has the steps.
            rank_zero_warn(f"The privacy statement could not be written: {error}")

    def _close(self, trainer: pl.Trainer) -> None:
        """Take the hooks off the module and leave the statement, also after an error."""
        if self._training_step is not None:
            self._training_step.close()
        give_back(trainer)
        train_again(trainer)
        estimate_by_loader(trainer)
        trainer.accumulate_grad_batches = 1
        if trainer.is_global_zero:
            self.leave_statement(trainer)

    def leave_statement(self, trainer: pl.Trainer) -> None:
        """Write the privacy statement to the log folder and show it, unless no step was taken."""
        if self._private is None or self.ledger.num_steps == self._stated:
            return
        self._stated = self.ledger.num_steps
        self._write(trainer, self.statement(trainer))

    def _write(self, trainer: pl.Trainer, statement: PrivacyStatement) -> None:
        self._written = statement
        statement.write(self._folder)
        trainer.print(statement.short())

    def statement(self, trainer: pl.Trainer, **more: Any) -> PrivacyStatement:
        """The privacy statement of the steps taken so far.

        Args:
            more: fields that are known better than here.

        Raises:
            ConfigurationError: before the first fit.
        """
        return self.private.statement(
            changed_outside=tuple(sorted(self._changed_outside)),
            unprotected=tuple(sorted(self._unprotected.names)),
            postprocessing=", then ".join(self.postprocessing) or "none",
            earlier_targets=tuple(self.budget.earlier_targets),
            lost_steps=self.ledger.num_steps - trainer.global_step,
            versions={name: installed(name) for name in ("dp-lightning", "torch", "lightning", "opacus")},
            **more,
        )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The module's own hook at the end of an epoch comes after this callback's, and before a checkpoint is chosen.
        self._unprotected.note_logged(trainer)
        count_logical_steps(checkpoint, self.ledger.num_steps)
        if self._private is not None:
            checkpoint[STATEMENT] = self.statement(trainer, weights="").saved()  # known when all is in the checkpoint

    def _before_save(self, trainer: pl.Trainer, checkpoint: dict[str, Any], folder: Path) -> None:
        if self._private is not None:
            self._unprotected.note_epoch(trainer)
            by_users = require_nothing_raw(checkpoint, trainer, self._unprotected.numbers, self._hyperparameters)
            self._unprotected.names |= by_users
            cut_views(checkpoint)
            names = tuple(sorted(self._unprotected.names))
            # The state and the statement in it were taken before the hooks of others.
            if (state := checkpoint.get("callbacks", {}).get(self.state_key)) is not None:
                state["unprotected"] = list(names)
            if STATEMENT in checkpoint:
                checkpoint[STATEMENT]["unprotected"] = names
            if self._written is not None and not by_users <= set(self._written.unprotected):
                self._write(trainer, replace(self._written, unprotected=names))
        self._record.beside(folder)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._evaluates = trainer.state.fn != TrainerFn.FITTING
        if not self._evaluates:
            saved = checkpoint.get("callbacks", {}).get(self.state_key) or {}
            require_counted_steps(trainer, checkpoint, saved)

    @property
    def state_key(self) -> str:
        """The same for subclasses, so that their checkpoints keep the ledger."""
        return "PrivacyCallback"

    def state_dict(self) -> dict[str, Any]:
        if self._private is None:
            # Before a fit: what was loaded, so that a checkpoint that is saved again keeps its ledger.
            return self._restored or {}
        return {
            "run": self._record.run,
            "heads": [] if self._record.journal is None else list(self._record.journal.heads),
            **self.budget.state_dict(),
            "settings": self._kept_settings,
            "step": self._private.state_dict(),
            "earlier_training": {"words": self._origin.words, "faults": self._origin.faults},
            "faults": self._private.all_faults,
            "unprotected": sorted(self._unprotected.names),
            "changed_outside": sorted(self._changed_outside),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # To evaluate an earlier checkpoint after a fit takes back no step of it.
        if not state_dict or (self._evaluates and self._private is not None):
            return
        if lacking := _STATE - state_dict.keys():
            raise ConfigurationError(
                f"The checkpoint is of an earlier version of dp-lightning: it lacks {', '.join(sorted(lacking))}. Go "
                "on with the version that has written it."
            )
        self._record.run, self._record.heads = state_dict["run"], tuple(state_dict["heads"])
        self.budget.load_state_dict(state_dict)
        self._unprotected.names |= set(state_dict["unprotected"])
        self._changed_outside |= set(state_dict["changed_outside"])
        self._origin = Origin(**state_dict["earlier_training"])
        self._origin.faults += [fault for fault in state_dict["faults"] if fault not in self._origin.faults]
        self._restored, self._stated = state_dict, self.ledger.num_steps


def _images_per_group(unit_of_privacy: str, given: int | None) -> int | None:
    """k where the unit of privacy is a person, and None where it is an example."""
    if unit_of_privacy not in ("example", "group"):
        raise ConfigurationError(f"privacy.unit_of_privacy is {unit_of_privacy!r}; choose 'example' or 'group'.")
    if unit_of_privacy == "group":
        return 1 if given is None else given
    if given is not None:
        raise ConfigurationError(
            f"privacy.images_per_group is {given}, but each image is an example of its own. Set "
            "privacy.unit_of_privacy: group to protect persons, or remove images_per_group."
        )
    return None


def privacy_of(trainer: pl.Trainer) -> PrivacyCallback | None:
    """The trainer's ``PrivacyCallback``; None where it has none."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, PrivacyCallback)), None)


def _average_in(trainer: pl.Trainer, module: nn.Module) -> str | None:
    """The callback of Lightning whose average of the weights the module holds since training has ended."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            pairs = zip(module.parameters(), callback._average_model.module.parameters(), strict=True)
            if all(torch.equal(mine, average) for mine, average in pairs):
                return type(callback).__name__
    return None


def fixed_statistics(module: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in evaluation mode, whose statistics have to be public."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.training and part.running_mean is not None
    ]


def _require_no_others(optimizer: Optimizer, trained: Iterable[Tensor]) -> None:
    """Refuse a gradient that is not one of the trained parameters'."""
    ids = {id(parameter) for parameter in trained}
    for group in optimizer.param_groups:
        for raw in group["params"]:
            if raw.grad is not None and id(raw) not in ids:
                raise ModelError(
                    f"A parameter of shape {tuple(raw.shape)} that was frozen when training started has a raw "
                    "gradient. Which parameters are trained must not change during a private run."
                )
