"""How a run resumes: what a checkpoint holds of it, the steps that ran after it, and the plan of those that are left.

`SavedRun` is the only reader and writer of the entry ``private_run`` of a checkpoint.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dp_lightning.errors import ConfigurationError, DataError, DpLightningError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.journal import Journal, run_name, run_of, stands_for
from dp_lightning.privacy.lineage import Origin
from dp_lightning.privacy.plan import TOLERANCE, PrivacyPlan, RunShape
from dp_lightning.privacy.seal import seal_of
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.unprotected import Unprotected

#: Under which name a checkpoint holds a run.
PRIVATE_RUN = "private_run"
_VERSION = 2
# Where version 1, which had no number, kept what is one entry now.
_ENTRIES_OF_VERSION_1 = ("privacy_statement", "privacy_seal")
_PARTS = ("statement", "settings", "step")
_RESTORE = "Use the file as the run wrote it, or another checkpoint of the run"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run as a checkpoint holds it.

    Lightning saves in this order, on every rank: ``state_dict`` of each callback; ``on_save_checkpoint`` of each
    callback, then of the module; the checkpoint IO, on rank 0. `PrivacyCallback` reserves the entry in its hook, and
    the IO has it written, when all else is in the checkpoint: the statement has the digest of the weights, and the
    seal is of the whole.

    It loads in this order, on every rank: the checkpoint IO, which compares the seal before a fit; ``setup`` of each
    callback, before it; ``on_load_checkpoint`` of the data module and of the module, then the weights;
    ``on_load_checkpoint`` of each callback, where `PrivacyCallback` reads the entry; ``load_state_dict`` of each
    callback; ``on_fit_start``, where `PrivacyCallback` makes the `PrivateRun` from it; optimizers, schedules and
    counters; ``on_train_start``.

    Attributes:
        statement: of the steps in the checkpoint's weights and of those that were lost.
        settings: ``PrivacySettings.of_the_run``.
        step: ``PrivateStep.state_dict``.
    """

    statement: PrivacyStatement
    settings: Mapping[str, Any]
    step: Mapping[str, Tensor]

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write it into a checkpoint that is otherwise complete, and seal the whole."""
        entry = {
            "version": _VERSION,
            "statement": self.statement.saved(),
            "settings": dict(self.settings),
            "step": dict(self.step),
        }
        checkpoint[PRIVATE_RUN] = entry
        entry["seal"] = _seal_of(checkpoint)

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "SavedRun | None":
        """The run in a checkpoint; None if it is not from a private run.

        Raises:
            DataError: where it is of another version, or not as a run has written it.
        """
        if PRIVATE_RUN not in checkpoint:
            callbacks = checkpoint.get("callbacks")
            in_callbacks = isinstance(callbacks, dict) and "PrivacyCallback" in callbacks
            if in_callbacks or any(name in checkpoint for name in _ENTRIES_OF_VERSION_1):
                raise _of_version(1)
            return None
        entry = checkpoint[PRIVATE_RUN]
        version = entry.get("version") if isinstance(entry, dict) else None
        if type(version) is not int:
            raise DataError(f"its private run has no version, so it was edited. {_RESTORE}")
        if version != _VERSION:
            raise _of_version(version)
        parts = [entry.get(name) for name in _PARTS]
        if wrong := [name for name, part in zip(_PARTS, parts, strict=True) if not isinstance(part, dict)]:
            raise DataError(f"its private run has no {' and no '.join(wrong)}, so it was edited. {_RESTORE}")
        if type(steps := checkpoint.get("global_step", 0)) is not int:
            raise DataError(f"its global_step is {steps!r} and not a number of steps, so it was edited. {_RESTORE}")
        try:
            statement, settings, step = (dict(part) for part in parts)
            return cls(statement=PrivacyStatement.from_saved(statement), settings=settings, step=step)
        except DpLightningError as error:
            raise DataError(f"its privacy statement cannot be read: {error}") from error
        except Exception as error:  # it may hold anything
            raise DataError(f"its private run cannot be read: {error!r}. {_RESTORE}") from error


def seal_in(checkpoint: Mapping[str, Any]) -> str:
    """The seal of a checkpoint of a private run, as it is written in it."""
    return str(checkpoint[PRIVATE_RUN]["seal"])


def broken_seal(checkpoint: Mapping[str, Any]) -> str | None:
    """What is wrong with the seal of a private run's checkpoint, in words; None if nothing, and for other files.

    A run resumes from everything in a checkpoint: momentum changes the weights with the next step, and an average is
    evaluated.
    """
    try:
        if SavedRun.read(checkpoint) is None:
            return None
        if seal_in(checkpoint) != _seal_of(checkpoint):
            return "it was edited after the run saved it, so its statement does not hold for it"
    except DataError as error:
        return str(error)
    except KeyError:
        return "it has no seal, so it was edited"
    return None


def _seal_of(checkpoint: Mapping[str, Any]) -> str:
    entry = {name: value for name, value in checkpoint[PRIVATE_RUN].items() if name != "seal"}
    return seal_of({**checkpoint, PRIVATE_RUN: entry})


def _of_version(version: int) -> DataError:
    return DataError(
        f"what it holds of a private run is of version {version}, and this dp-lightning reads version {_VERSION}. "
        f"Resume and export it with the {'newer' if version > _VERSION else 'earlier'} dp-lightning that wrote it"
    )


def require_counted_steps(trainer: pl.Trainer, checkpoint: Mapping[str, Any], saved: SavedRun | None) -> None:
    """Refuse to train on from steps that no ledger counts, and from a file that Lightning has picked up by its name.

    Raises:
        ConfigurationError: with what to do instead.
    """
    name = Path(trainer.ckpt_path or "").name
    if name.startswith("hpc_ckpt_"):
        raise ConfigurationError(
            f"Under SLURM Lightning resumes from any hpc_ckpt_*.ckpt in trainer.default_root_dir, and {name} may be "
            "another job's. Move it away for a new run, or give it another name and pass it as ckpt_path."
        )
    counted = 0 if saved is None else saved.statement.ledger.num_steps
    if checkpoint.get("global_step", 0) > counted:
        raise ConfigurationError(
            f"The checkpoint has taken {checkpoint['global_step']} steps and its ledger holds {counted}: what the "
            "other steps spent is unknown. Resume from a checkpoint of a private run, or load its weights into a "
            "new run if they come from public data."
        )


class RunHistory:
    """The past of a run when a fit begins: earlier fits in this process, or a checkpoint.

    Attributes:
        run: name of the run; one that resumes keeps it.
        ledger: its steps, which no fit and no checkpoint takes back.
        journal: on rank 0 once a fit has begun; None on other ranks.
        saved: what a checkpoint holds of it, until a fit begins.
        plan: of its last steps.
        origin: what trained the weights before the run.
        earlier_targets: targets that it had, each with the number of steps after which it was exchanged.
        changed_outside: attributes of the module that other code than the loss has changed.
        unprotected: what was logged of raw examples.
    """

    def __init__(self) -> None:
        self.run = run_name({})
        self.ledger = Ledger()
        self.journal: Journal | None = None
        self.saved: SavedRun | None = None
        self.plan: PrivacyPlan | None = None
        self.origin = Origin()
        self.earlier_targets: list[tuple[float | None, int]] = []
        self.changed_outside: set[str] = set()
        self.unprotected = Unprotected()
        self._left: Path | None = None

    def load(self, saved: SavedRun) -> None:
        """Let the next fit resume the run of a checkpoint.

        Raises:
            BudgetError: where its ledger lacks steps that this one has.
        """
        said = saved.statement
        self.ledger.load_state_dict(said.ledger.state_dict())
        self.run, self.plan, self.saved = said.run, said.plan, saved
        self.origin = Origin(words=list(said.earlier_training), faults=list(said.faults))
        self.earlier_targets = list(said.earlier_targets)
        self.changed_outside |= set(said.changed_outside)
        self.unprotected.names |= set(said.unprotected)

    def count_steps_of(self, journal: Path) -> None:
        """Let the next fit without a checkpoint resume the run of this journal.

        Its weights are lost and its steps are spent: they count in the ledger, and are missing in the new weights.
        """
        self._left = journal

    def note_target(self, target: float | None) -> None:
        """Note that the next steps have another target than those before."""
        noted = [before for before, _ in self.earlier_targets[-1:]]
        if self.plan is not None and self.plan.target_epsilon != target and noted != [self.plan.target_epsilon]:
            self.earlier_targets.append((self.plan.target_epsilon, self.ledger.num_steps))

    def open_journal(self, trainer: pl.Trainer, folder: Path) -> bool:
        """Count the steps that ran after the checkpoint, on every rank, and record the coming ones.

        Args:
            trainer: about to fit.
            folder: where a journal is kept, besides those beside checkpoints.

        Returns:
            Whether this fit resumes a run that stands on disk.

        Raises:
            ConfigurationError: where the weights were trained by other runs than the name of this one stands for.
            DataError: when the checkpoint's journal is missing or older, or one cannot be read or written.
        """
        from_checkpoint = self.saved is not None and trainer.ckpt_path is not None
        left, self._left = self._left, None
        if from_checkpoint or self.journal is not None:
            left = None
        if left is not None:
            self.run = run_of(left)
        elif self.saved is None and self.journal is None:
            self.run = run_name(self.ledger.earlier, self.run)
        if not stands_for(self.run, self.ledger.earlier):
            raise ConfigurationError(
                "The weights were trained by other private runs than those that the steps of this run came after. Make "
                "a new PrivacyCallback for them, and start without ckpt_path."
            )
        self.run, from_journal = trainer.strategy.broadcast((self.run, left is not None))
        if trainer.is_global_zero:
            self.journal = self.journal or Journal(self.run)
            if left is not None:
                self.journal.read(left.parent)
            if self.saved is not None and trainer.ckpt_path is not None:
                self._read_beside(Path(trainer.ckpt_path).parent, self.journal, self.saved.statement.journal_heads)
            self.journal.add_folder(folder, self.ledger)
            self.ledger.load_state_dict(self.journal.ledger.state_dict())
        self.ledger.load_state_dict(trainer.strategy.broadcast(self.ledger.state_dict()))
        return from_checkpoint or from_journal

    def _read_beside(self, folder: Path, journal: Journal, heads: Iterable[str]) -> None:
        """Add the steps of the journal beside a checkpoint."""
        recorded = journal.read(folder)
        if recorded is None:
            raise DataError(
                f"{journal.path(folder)} is missing, so it is unknown how many steps ran after the "
                "checkpoint. Copy the journal together with the checkpoints of its folder."
            )
        if missing := journal.missing(heads):
            raise DataError(
                f"{journal.path(folder)} is older than the checkpoint beside it: it lacks "
                f"{', '.join(missing)}, and nobody knows what else. Restore the file from a copy."
            )
        if self.ledger.totals - recorded.totals:
            raise DataError(
                f"{journal.path(folder)} does not hold the {self.ledger.num_steps} steps of the checkpoint "
                "beside it. Restore the file from a copy."
            )

    def keep_journal_in(self, folder: Path) -> None:
        """Keep a journal in a folder to which a checkpoint is about to be written."""
        if self.journal is not None:
            self.journal.add_folder(folder, self.ledger)


def plan_of_fit(settings: PrivacySettings, shape: RunShape, history: RunHistory) -> tuple[PrivacyPlan, bool]:
    """The plan of a fit.

    A run that resumes with the settings of its ``earlier`` plan keeps its noise. With other settings the noise of
    the steps that are left is solved for, so that they and those in the ledger together meet the target. Where
    steps in the ledger have no ``earlier`` plan, it is read off their noise.

    Args:
        settings: of the run now.
        shape: N, B, T and delta now.
        history: with the steps that count, and the plan of the fit or the checkpoint before.

    Returns:
        The plan, and whether it is that of the steps in the ledger.

    Raises:
        ConfigurationError: when the numbers are impossible, or those of another data set.
        BudgetError: when nothing is left to spend.
    """
    ledger = history.ledger
    earlier = history.plan if ledger.num_steps else None  # a fit that was refused has taken no step of its plan
    if earlier is not None:
        _require_one_data_set(earlier, shape)
        history.note_target(settings.target_epsilon)
    elif ledger.num_steps:
        earlier = _plan_of_ledger(settings, shape, ledger)
    if settings.target_epsilon is None:
        plan = settings.make_plan(shape)
    elif earlier is not None and earlier == settings.plan_with(shape, earlier.noise_multiplier):
        plan = earlier
    else:
        plan = settings.make_plan(shape, taken=ledger.runs, earlier=tuple(ledger.earlier_steps))
        usual = settings.make_plan(shape) if earlier is None and ledger.earlier_steps else earlier
        if usual is not None and plan.noise_multiplier > 2 * usual.noise_multiplier > 0:
            rank_zero_warn(
                f"To meet privacy.target_epsilon {settings.target_epsilon} the steps that are left need a noise "
                f"multiplier of {plan.noise_multiplier:.4g}, and {usual.noise_multiplier:.4g} "
                f"{'without the steps behind the weights' if earlier is None else 'so far'}. They will teach the model "
                "little: raise the target, or stop here."
            )
    return plan, plan == earlier


def _require_one_data_set(earlier: PrivacyPlan, now: RunShape) -> None:
    """Refuse another N, for which epsilon does not hold, and another B, by which steps are counted."""
    if earlier.num_train != now.num_train:
        raise ConfigurationError(
            f"The run has trained on {earlier.num_train} examples, and there are {now.num_train} now. Its "
            "epsilon holds for one data set: resume with that one, or start a new run."
        )
    if earlier.expected_batch_size != now.expected_batch_size:
        raise ConfigurationError(
            f"The run has privacy.expected_batch_size {earlier.expected_batch_size}, and it is "
            f"{now.expected_batch_size} now; epochs and steps are counted by it. Set it to the run's value."
        )


def _plan_of_ledger(settings: PrivacySettings, shape: RunShape, ledger: Ledger) -> PrivacyPlan | None:
    """The plan with the noise of the steps in the ledger; None where they were planned otherwise."""
    (noise_multiplier, sample_rate), *others = ledger.totals
    if ledger.num_steps >= shape.num_steps:
        return settings.plan_with(shape, ledger.runs[-1][0])  # no step is left to solve for
    plan = settings.make_plan(shape, earlier=tuple(ledger.earlier_steps))
    # Another machine may solve for the same noise to another last digit.
    same = math.isclose(plan.noise_multiplier, noise_multiplier, rel_tol=2 * TOLERANCE)
    if others or sample_rate != shape.sample_rate or not same:
        return None
    return settings.plan_with(shape, noise_multiplier)
