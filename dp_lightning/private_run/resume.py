"""How a run resumes: the run in a checkpoint, the steps that ran after it, and the plan of the steps that are left.

`latest_checkpoint` finds the checkpoint that ``ckpt_path: last`` means.

Two objects hold the past of a run: its journal, and the entry ``private_run`` of a checkpoint, a `SavedRun`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dp_lightning.errors import BudgetError, ConfigurationError, DataError
from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.journal import Journal
from dp_lightning.privacy.plan import PrivacyPlan, RunShape
from dp_lightning.privacy.record import RunRecord
from dp_lightning.privacy.statement import PrivacyStatement, installed
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.unprotected import Unprotected
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

#: The name under which a checkpoint holds a run.
PRIVATE_RUN = "private_run"
#: In ``default_root_dir``: the folders of runs whose Trainer has no log folder.
RUNS = "privacy_runs"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run as a checkpoint holds it.

    Attributes:
        statement: statement of the steps in the checkpoint's weights and of the steps that were lost.
        settings: ``PrivacySettings.values``.
        step: ``PrivateStep.state_dict``.
    """

    statement: PrivacyStatement
    settings: Mapping[str, Any]
    step: Mapping[str, Tensor]

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write the run into a checkpoint."""
        checkpoint[PRIVATE_RUN] = {**vars(self), "statement": self.statement.saved()}

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "SavedRun | None":
        """The run in a checkpoint; None if it is not from a private run.

        Raises:
            DataError: where another version of this package has written it.
        """
        if (entry := checkpoint.get(PRIVATE_RUN)) is None:
            return None
        try:
            statement = PrivacyStatement.from_dict(entry["statement"])
            return cls(statement=statement, settings=entry["settings"], step=entry["step"])
        except (KeyError, TypeError, DataError) as error:
            raise DataError(
                f"The private run in the checkpoint cannot be read by dp-lightning {installed('dp-lightning')} "
                f"({error}). Resume and export it with the version that wrote it."
            ) from error


def require_counted_steps(checkpoint: Mapping[str, Any], saved: SavedRun | None) -> None:
    """Refuse to train on from steps that no ledger counts.

    Raises:
        ConfigurationError: with what to do instead.
    """
    counted = 0 if saved is None else saved.statement.ledger.num_steps
    if checkpoint.get("global_step", 0) > counted:
        raise ConfigurationError(
            f"The checkpoint has taken {checkpoint['global_step']} steps and its ledger holds {counted}: what the "
            "other steps spent is unknown. Resume from a checkpoint of a private run, or load its weights into a "
            "new run if they come from public data."
        )


@dataclass
class RunHistory:
    """The past of a run when a fit begins: earlier fits in this process, or a checkpoint.

    Attributes:
        record: record of the run's steps, which no fit and no checkpoint takes back; on rank 0 it has a journal once a
            fit has begun.
        saved: the run as a checkpoint holds it, until a fit begins, and ``folder`` of that checkpoint.
        in_weights: number of steps of the ledger that the weights had when the last fit ended.
        plan: plan of the last steps.
        unprotected: numbers that were logged of raw examples.
    """

    record: RunRecord = field(default_factory=RunRecord)
    saved: SavedRun | None = None
    folder: Path = Path()
    in_weights: int = 0
    plan: PrivacyPlan | None = None
    unprotected: Unprotected = field(default_factory=Unprotected)

    @property
    def ledger(self) -> Ledger:
        """The steps that the run has taken so far."""
        return self.record.ledger

    def load(self, saved: SavedRun, folder: Path) -> None:
        """Let the next fit resume the run of a checkpoint in a folder.

        Raises:
            BudgetError: where the checkpoint's ledger lacks steps that the run has taken.
        """
        said, record = saved.statement, self.record
        record.ledger.load_state_dict(said.ledger.state_dict())
        record.run, record.earlier_training = said.run, list(said.earlier_training)
        record.faults |= said.lasting_faults
        record.noise_coefficients = said.noise_coefficients
        self.plan, self.saved, self.folder = said.plan, saved, folder
        self.in_weights = said.ledger.num_steps - said.lost_steps
        self.unprotected.names |= set(said.unprotected)

    def open_journal(self, trainer: pl.Trainer, folder: Path) -> bool:
        """Count the steps that ran after the checkpoint, on every rank, and record the coming ones.

        Args:
            folder: folder of the run, where a journal is kept besides those beside checkpoints.

        Returns:
            Whether this fit resumes a run from a checkpoint.

        Raises:
            DataError: when the checkpoint's journal is missing or older, or a journal cannot be read or written.
        """
        record = self.record
        record.run = trainer.strategy.broadcast(record.run)
        if trainer.is_global_zero:
            if record.journal is None or record.journal.run != record.run:
                record.journal = Journal(record.run)
            if self.saved is not None:
                _read_beside(self.folder, record.journal, self.saved.statement)
            record.journal.add_folder(folder, record.ledger)
            record.ledger.load_state_dict(record.journal.ledger.state_dict())
        record.ledger.load_state_dict(trainer.strategy.broadcast(record.ledger.state_dict()))
        return self.saved is not None and trainer.ckpt_path is not None


def _read_beside(folder: Path, journal: Journal, statement: PrivacyStatement) -> None:
    """Add the steps of the journal beside a checkpoint, which must have the steps of the checkpoint."""
    path = journal.path(folder)
    if not path.is_file():
        raise DataError(
            f"{path} is missing, so it is unknown how many steps ran after the checkpoint. Copy the journal together "
            "with the checkpoints of its folder."
        )
    journal.add_folder(folder)
    if statement.journal_head not in {"", *journal.steps}:
        raise DataError(
            f"{path} is older than the checkpoint beside it: it lacks step {statement.journal_head}, and nobody knows "
            "what else. Restore the file from a copy."
        )


def plan_of_fit(settings: PrivacySettings, shape: RunShape, history: RunHistory) -> tuple[PrivacyPlan, bool]:
    """The plan of a fit.

    A run that resumes with the settings of its earlier plan keeps its noise. With other settings the noise of the steps
    that are left is solved for, so that these steps and those in the ledger together meet the target.

    Args:
        settings: settings of the run now.
        shape: N, B, T and delta now.
        history: the steps that count, and the plan of the fit or the checkpoint before.

    Returns:
        The plan, and whether the run of that plan is at its end.

    Raises:
        ConfigurationError: when the numbers are impossible, or those of another data set.
        BudgetError: when nothing is left to spend.
    """
    ledger = history.ledger
    earlier = history.plan if ledger.num_steps else None  # a fit that was refused has taken no step of its plan
    for name in ("num_train", "expected_batch_size"):
        if earlier is not None and getattr(earlier, name) != getattr(shape, name):
            raise ConfigurationError(
                f"The run has privacy.{name} {getattr(earlier, name)}, and it is {getattr(shape, name)} now: its "
                "epsilon holds for one data set, and steps are counted by the batch. Resume with the run's value, or "
                "start a new run."
            )
    if earlier is not None and settings.bands == "auto":  # what is best depends on the number of steps
        shape = replace(shape, bands=earlier.bands)
    kept = earlier is not None and earlier == settings.plan_with(shape, earlier.noise_multiplier)
    if settings.target_epsilon is None:
        plan = settings.make_plan(shape)
    elif earlier is not None and kept and _meets_target(earlier, ledger):
        plan = earlier
    else:
        steps = ledger.num_steps
        try:
            plan = settings.make_plan(shape, spent=ledger.spent, steps_taken=steps)
        except BudgetError:
            if earlier is None or not kept:
                raise
            rank_zero_warn(
                "The run was interrupted, and what is left of the budget has no room for the round of correlated noise "
                f"that this costs: the run ends after {steps} of {shape.num_steps} steps."
            )
            return earlier, True
    return plan, plan == earlier and ledger.num_steps >= plan.num_steps


def _meets_target(plan: PrivacyPlan, ledger: Ledger) -> bool:
    """Whether the steps that are left can have the plan's noise, though they begin a new block of correlated noise."""
    left = plan.num_steps - ledger.num_steps
    if plan.bands == 1 or plan.target_epsilon is None or left < 1:
        return True
    runs = [*ledger.spent, *plan.rounds(plan.noise_multiplier, ledger.num_steps)]
    return compose(runs, delta=plan.delta, accountant=plan.accountant) <= plan.target_epsilon


def latest_checkpoint(trainer: pl.Trainer, weights_only: bool | None = None) -> str | None:
    """The `newest_checkpoint` of the folders where runs of a trainer's configuration leave checkpoints.

    Returns:
        The path of the checkpoint; None, with a warning, where there is no checkpoint.
    """
    given = [each.dirpath for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", logger.save_dir))]
    logs = [folder for root in roots for folder in sorted(root.glob("*")) if folder.is_dir()]
    logs.append(Path(trainer.default_root_dir))
    folders = [*(Path(folder) for folder in given if folder), *logs, *(folder / "checkpoints" for folder in logs)]
    if (path := newest_checkpoint(folders, weights_only)) is None:
        rank_zero_warn(
            f"ckpt_path is 'last', but there is no checkpoint in {', '.join(map(str, folders))}: this is a new run. If "
            "you meant another one, stop here and give its checkpoint, or its trainer.default_root_dir."
        )
    return path


def newest_checkpoint(folders: Iterable[Path], weights_only: bool | None = None) -> str | None:
    """The newest checkpoint of a private run in these folders, or None; those of weights alone are passed over.

    Raises:
        ConfigurationError: when there are checkpoints, and none of them holds a private run.
        DataError: when the newest one is damaged, or another version of this package has written it.
    """
    paths = {path for folder in folders for path in folder.glob("*.ckpt")}
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path), reverse=True):
        try:
            found = SavedRun.read(PrivateCheckpointIO().load_checkpoint(path, weights_only=weights_only))
        except DataError as error:
            raise DataError(f"{error} Move it away for ckpt_path 'last', or give the path of another one.") from error
        if found is not None:
            return str(path)
    if paths:
        raise ConfigurationError(
            f"ckpt_path is 'last', but no checkpoint holds a private run, such as {max(paths)}: ModelCheckpoint has "
            "save_weights_only: true, or they are of other runs."
        )
    return None
