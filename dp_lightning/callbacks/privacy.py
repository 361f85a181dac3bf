"""Trains any LightningModule privately: the Lightning hooks around one ``PrivateMechanism``.

The way of one logical step. The loader hands out physical batches of one Poisson draw. Around each one's backward pass
the gradient engine collects clipped per-example gradients; parameters get no ordinary gradient. On the last one the
mechanism releases the privatized gradient into ``.grad``, before the hooks of any other callback, and the optimizer
steps. Lightning's counters see logical steps only, because ``trainer.accumulate_grad_batches`` is set to one on the
last physical batch and to a very large number on the others.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_lightning.callbacks.agreement import require_equal_replicas, require_same_data, require_same_settings
from dp_lightning.callbacks.budget import Budget
from dp_lightning.callbacks.checkpoints import (
    count_logical_steps,
    require_counted_steps,
    require_one_checkpoint,
    saved_steps,
)
from dp_lightning.callbacks.example_gradients import ExampleGradients, GradientSettings
from dp_lightning.callbacks.model_trial import try_model
from dp_lightning.callbacks.private_loader import (
    PoissonBatchSampler,
    PrivateSource,
    private_loader,
)
from dp_lightning.callbacks.run_journal import RunJournal
from dp_lightning.callbacks.settings import check_optimizers, check_order, check_settings
from dp_lightning.callbacks.unprotected import Unprotected
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.checks.layers import fixed_statistics
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.mechanism import PrivateMechanism
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.sampling import PhysicalBatch, PoissonSampler, sampling_key
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.ranks import Ranks
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO
from dp_lightning.strategies.private import trainer_ranks

#: Where a checkpoint keeps what the privacy statement of its steps says.
STATEMENT = "privacy_statement"
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
        max_physical_batch_size: most images that go through the model at once, every view of an example counted. It
            bounds memory and changes nothing else.
        accountant: by which epsilon is planned and shown.
        loss_reduction: whether ``training_step`` returns the mean or the sum of the examples' losses.
        num_train: N; None reads it from the training data set. A number that differs from the data set is refused.
        noise_seed: makes the noise reproducible, and the run not fit for release.
        sampling_seed: makes the Poisson draws reproducible, and the run not fit for release.
        not_private: must be true to allow ``noise_multiplier: 0``.
        augmult: K, augmentation multiplicity (De et al. 2022): each example enters a logical batch as K views, drawn
            anew by the data set's transform, and the mean of their gradients is clipped once. It costs no privacy.
        disk: takes each example's gradient where DiSK does (Zhang et al. 2025); its filter is `Kalman` in the
            post-processing. None is the gradient at the parameters.

    Raises:
        ConfigurationError: naming the setting and the fix; from the constructor, and when ``fit`` starts.
        ModelError: naming the module that mixes examples or whose per-example gradient cannot be taken.
        BudgetError: when a step would spend more than was planned.
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
        max_physical_batch_size: int = 128,
        accountant: Literal["prv", "rdp", "pld"] = "prv",
        loss_reduction: Literal["mean", "sum"] = "mean",
        num_train: int | None = None,
        noise_seed: int | None = None,
        sampling_seed: int | None = None,
        not_private: bool = False,
        augmult: int = 1,
        disk: DiSK | None = None,
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
        self.gradient_settings = GradientSettings(loss_reduction, augmult, disk)
        if max_physical_batch_size < augmult:
            raise ConfigurationError(
                f"privacy.max_physical_batch_size is {max_physical_batch_size}; it must be at least {augmult}"
                + (", privacy.augmult: all views of an example go through the model at once." if augmult > 1 else ".")
            )
        make = {"flat": ClipPlan.flat, "per_layer": ClipPlan.per_layer}
        if clipping not in make:
            raise ConfigurationError(f"privacy.clipping is {clipping!r}; choose 'flat' or 'per_layer'.")
        self.clip_plan = make[clipping](max_grad_norm=max_grad_norm, factor=clip_factor)
        self.max_physical_batch_size = max_physical_batch_size
        self.num_train, self.noise_seed, self.sampling_seed = num_train, noise_seed, sampling_seed
        self._batches: PoissonBatchSampler | None = None
        self._gradients: ExampleGradients | None = None
        self._mechanism: PrivateMechanism | None = None
        self._batch: PhysicalBatch | None = None
        self._steps_before = self._stated = 0
        self._folder = Path()
        self._record = RunJournal()
        self._ranks = Ranks()
        self._unprotected = Unprotected()
        self._restored: dict[str, Any] | None = None
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
        assert self._mechanism is not None
        return self._mechanism.noise_standard_deviation / self._mechanism.plan.expected_batch_size

    @property
    def run(self) -> str:
        """Name of the run; one that goes on keeps it."""
        return self._record.run

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
        if self.plan is None and self.num_train is not None:
            self.budget.make_plan(trainer, self.num_train)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check(trainer, pl_module)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = PrivateCheckpointIO(self._record.beside)
        if stage != "fit":
            return
        source = trainer.fit_loop._data_source
        if not isinstance(source, PrivateSource):
            trainer.fit_loop._data_source = PrivateSource(source, self._private_loader)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        source = trainer.fit_loop._data_source
        assert isinstance(source, PrivateSource)
        # Asked now and by every rank: Lightning asks rank 0 for it, which may be alone at the end.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._ranks = trainer_ranks(trainer)
        self.stop_requested = self.stopping = False
        self.postprocessing = []
        require_one_checkpoint(trainer, self._ranks)
        require_same_settings(self._settings(), self._ranks, trainer.strategy.root_device)
        self._record.open(trainer, self._folder, self.ledger, goes_on=self._restored is not None)
        self._stated = self.ledger.num_steps
        if self.plan is None or self._restored is not None:
            dataset: Any = source.users().dataset
            earlier = None if self._restored is None else PrivacyPlan(**self._restored["plan"])
            self.budget.make_plan(trainer, len(dataset) if self.num_train is None else self.num_train, earlier=earlier)
        self._gradients = ExampleGradients(pl_module, self.gradient_settings)
        trained = self._gradients.parameters
        check_optimizers(trainer, trained.values())
        # One key for all ranks, and one plan: a solver may round differently on another kind of processor.
        self.budget.plan, key = trainer.strategy.broadcast((self.plan, sampling_key(self.sampling_seed)))
        assert self.plan is not None
        noise = GaussianNoise(device=pl_module.device, seed=self.noise_seed)
        self._mechanism = PrivateMechanism(
            trained,
            plan=self.plan,
            clip_plan=self.clip_plan,
            noise=noise,
            ledger=self.ledger,
            ranks=self._ranks,
            journal=self._record.journal,
        )
        sampler = PoissonSampler(
            num_train=self.plan.num_train, sample_rate=self.plan.sample_rate, seed=self.sampling_seed, key=key
        )
        if self._restored is not None:
            noise.load_state_dict(self._restored["noise"])
            self.gradient_settings.require_same(self._restored["gradients"]["settings"])
            self._gradients.load_state_dict(self._restored["gradients"]["state"])
            sampler.load_state_dict(self._restored["sampler"])
        if self.noise_seed is not None:
            # Of steps that were lost, or taken by an earlier fit.
            self._mechanism.skip_noise(self.ledger.num_steps - saved_steps(self._restored or {}))
        self._batches = PoissonBatchSampler(
            sampler,
            self.plan,
            max_physical_batch_size=self.max_physical_batch_size,
            augmult=self.gradient_settings.augmult,
            steps_done=lambda: self.ledger.num_steps,
            ranks=self._ranks,
        )
        self._mechanism.require_budget()
        self.budget.require_affordable()
        self.budget.look_ahead()
        fixed_seed = self.noise_seed is not None or self.sampling_seed is not None
        trainer.print(self.budget.announcement(self.clip_plan, fixed_seed=fixed_seed))
        if fixed := fixed_statistics(pl_module):
            trainer.print(
                f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee "
                "and have to come from public data."
            )

    def _settings(self) -> dict[str, object]:
        """What ranks need to have in common; the plan and the sampling key come from rank 0."""
        return {
            "privacy.max_grad_norm, clipping or clip_factor": (self.clip_plan.describe(), self.clip_plan.sensitivity),
            "privacy.expected_batch_size": self.budget.expected_batch_size,
            "privacy.max_physical_batch_size": self.max_physical_batch_size,
            "privacy.loss_reduction, augmult or disk": self.gradient_settings,
            "privacy.noise_seed": self.noise_seed,
        }

    def _private_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        assert self.plan is not None
        assert self._batches is not None
        dataset: Any = loader.dataset
        if len(dataset) != self.plan.num_train:
            raise ConfigurationError(
                f"The training data set has {len(dataset)} examples, but the plan was made for privacy.num_train "
                f"{self.plan.num_train}. Remove num_train, or correct it."
            )
        return private_loader(loader, self._batches)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._gradients is not None
        disk = self.gradient_settings.disk
        if disk is not None and not self.postprocessing:  # PostProcessCallback looks at the filter itself
            raise ConfigurationError(
                f"privacy.disk needs its filter: put Kalman with gain {disk.gain:g} and applies_to: all first "
                "into the transforms of PostProcessCallback."
            )
        assert self._batches is not None
        loader = self._batches.loader_of(trainer)
        require_same_data(loader.dataset, self._ranks, trainer.strategy.root_device)
        try_model(
            trainer,
            pl_module,
            self._gradients.engine,
            loader,
            self.gradient_settings,
            max_rows=self.max_physical_batch_size,
        )

    # One physical batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._batches is not None
        assert self._mechanism is not None
        assert self._gradients is not None
        self._batch = self._batches.announced.popleft()
        if self._batch.first:
            self._mechanism.begin()
            self._steps_before = self.ledger.num_steps
        trainer.accumulate_grad_batches = 1 if self._batch.last else _ACCUMULATE
        size = len(self._batch.indices)
        self._mechanism.begin_batch(size, count=not self._batch.placeholder)
        self._gradients.begin(batch, batch_idx, size=size, first=self._batch.first, take=self._mechanism.take)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert self._gradients is not None
        self._gradients.scale(loss, trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._mechanism is not None
        assert self._gradients is not None
        if self._batch is None:
            raise ModelError("There is more than one backward pass in a batch; a private step needs exactly one.")
        self._gradients.finish(trainer)
        self._batch = None
        self._mechanism.end_batch()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert self._mechanism is not None
        assert self._gradients is not None
        if trainer.accumulate_grad_batches != 1 or self._batch is not None:
            raise ModelError(
                "The optimizer steps without a complete logical batch. training_step must return the loss of every "
                "batch (never None), and nothing else may set trainer.accumulate_grad_batches."
            )
        self._gradients.require_no_others(optimizer)
        self._unprotected.add_non_finite(self._mechanism.discarded)
        released = self._mechanism.release(stop=self.stop_requested)
        self.stopping = released.stop
        for name, gradient in released.gradients.items():
            parameter = self._gradients.parameters[name]
            parameter.grad = gradient.to(parameter.dtype)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._batch is not None:
            raise ModelError("training_step returned no loss; it must return the loss of every batch.")
        assert self.plan is not None
        self._unprotected.note_logged(trainer)
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
        if self._gradients is not None:
            self._gradients.end()
            require_equal_replicas(pl_module, self._ranks)
        if self.plan is not None and self.ledger.num_steps >= self.plan.num_steps:
            # Where steps were lost in a crash, Lightning's own counters would go on without any.
            trainer.should_stop = True

    # After the run

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._unprotected.note_logged(trainer)
        trainer.accumulate_grad_batches = 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            self._close(trainer)
        except OSError as error:
            # The exception itself matters more, and the journal has the steps.
            rank_zero_warn(f"The privacy statement could not be written: {error}")

    def _close(self, trainer: pl.Trainer) -> None:
        """Take the hooks off the module and leave the statement, also after an error."""
        if self._gradients is not None:
            self._gradients.close()
        trainer.accumulate_grad_batches = 1
        self._batch = None
        if trainer.is_global_zero:
            self.leave_statement(trainer)

    def leave_statement(self, trainer: pl.Trainer) -> None:
        """Write the privacy statement to the log folder and show it, unless no step was taken."""
        if self.plan is None or self.ledger.num_steps == self._stated:
            return
        self._stated = self.ledger.num_steps
        statement = self.statement(trainer)
        statement.write(self._folder)
        trainer.print(statement.short())

    def statement(self, trainer: pl.Trainer) -> PrivacyStatement:
        """The privacy statement of the steps taken so far.

        Raises:
            ConfigurationError: before the first fit.
        """
        if self.plan is None:
            raise ConfigurationError("There is no statement before trainer.fit has made the privacy plan.")
        return PrivacyStatement(
            plan=self.plan,
            ledger=self.ledger,
            clipping=self.clip_plan.describe() | self.gradient_settings.describe(),
            sensitivity=self.clip_plan.sensitivity,
            sampler="Poisson, each example independently with probability q in every logical step",
            unprotected=tuple(sorted(self._unprotected.names)),
            fixed_noise_seed=self.noise_seed is not None,
            fixed_sampling_seed=self.sampling_seed is not None,
            private=self.plan.noise_multiplier > 0,
            postprocessing=", then ".join(self.postprocessing) or "none",
            earlier_targets=tuple(self.budget.earlier_targets),
            lost_steps=self.ledger.num_steps - trainer.global_step,
            num_ranks=self._ranks.size,
            versions={name: version(name) for name in ("dp-lightning", "torch", "lightning", "opacus")},
        )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The module's own hook at the end of an epoch comes after this callback's, and before a checkpoint is chosen.
        self._unprotected.note_logged(trainer)
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is not None:
            state["unprotected"] = sorted(self._unprotected.names)  # it was taken before this hook
        count_logical_steps(checkpoint, self.ledger.num_steps)
        if self.plan is not None:
            checkpoint[STATEMENT] = self.statement(trainer).saved()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            saved = checkpoint.get("callbacks", {}).get(self.state_key) or {}
            require_counted_steps(trainer, checkpoint, saved)

    @property
    def state_key(self) -> str:
        """The same for subclasses, so that their checkpoints keep the ledger."""
        return "PrivacyCallback"

    def state_dict(self) -> dict[str, Any]:
        if self._mechanism is None or self._batches is None:
            # Before a fit: what was loaded, so that a checkpoint that is saved again keeps its ledger.
            return self._restored or {}
        return {
            "run": self._record.run,
            **self.budget.state_dict(),
            "noise": self._mechanism.noise.state_dict(),
            "sampler": self._batches.sampler.state_dict(),
            "gradients": {
                "settings": self.gradient_settings.clipped,
                "state": {} if self._gradients is None else self._gradients.state_dict(),
            },
            "unprotected": sorted(self._unprotected.names),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        self._record.run = state_dict["run"]
        self.budget.load_state_dict(state_dict)
        self._unprotected.names |= set(state_dict["unprotected"])
        self._restored, self._stated = state_dict, self.ledger.num_steps


def privacy_of(trainer: pl.Trainer) -> PrivacyCallback | None:
    """The trainer's ``PrivacyCallback``; None where it has none."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, PrivacyCallback)), None)
