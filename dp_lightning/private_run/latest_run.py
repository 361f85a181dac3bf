"""Which checkpoint a ``dpl fit`` resumes, or which journal where a run has left no checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.journal import journals_in, run_of
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.private_run.slurm import earlier_start
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


class Start(NamedTuple):
    """Where a fit starts from; both are None for a new run.

    Attributes:
        checkpoint: the path for ``trainer.fit(ckpt_path=...)``.
        journal: of a run that has left no checkpoint, for ``RunHistory.left``.
    """

    checkpoint: str | None = None
    journal: Path | None = None


@dataclass
class _Run:
    """The files of a run on disk; each checkpoint with its steps in the ledger and in the weights, and its time."""

    checkpoints: list[tuple[tuple[int, int, float], Path]] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        return [*self.journals, *(path for _, path in self.checkpoints)]


def where_to_start(trainer: pl.Trainer, asked: str | None, weights_only: bool | None = None) -> Start:
    """From where a fit starts.

    ``last`` is the run that was written to last, of those that stand where runs of this configuration leave their
    files, and of its checkpoints the one with the most steps in its ledger. One that cannot be loaded is skipped with a
    warning. A run that was killed before its first checkpoint has only a journal: its weights are initialized again,
    and its steps stay counted. If there is nothing, it is a new run.

    Args:
        trainer: before its run.
        asked: the setting ``ckpt_path``: a path, ``last``, or None for a new run. A SLURM job that was put back into
            the queue resumes its own run, whatever was asked when it was submitted.
        weights_only: as `PrivateCheckpointIO` takes it.

    Raises:
        ConfigurationError: when a run has checkpoints, and none of them can be loaded.
    """
    if (earlier := earlier_start(trainer)) is not None:
        folders, name = earlier
        runs, broken = _runs_in(folders, weights_only)
        if name in runs:
            return _start_of(runs[name], broken, weights_only)
    if asked != "last":
        return Start(asked)
    folders = _folders(trainer)
    runs, broken = _runs_in(folders, weights_only)
    if runs:
        latest = max(runs.values(), key=lambda run: max(path.stat().st_mtime for path in run.files))
        return _start_of(latest, broken, weights_only)
    if broken:
        raise ConfigurationError(f"ckpt_path is 'last', but no checkpoint can be loaded. {_listed(broken)}")
    rank_zero_warn(
        f"ckpt_path is 'last', but no run has left a checkpoint or a journal in {', '.join(map(str, folders))}: this "
        "is a new run. If you meant another one, stop here and give its checkpoint, or its trainer.default_root_dir."
    )
    return Start()


def _start_of(run: _Run, broken: dict[Path, str], weights_only: bool | None) -> Start:
    # Those of other runs cannot be told from those of this one: what they hold is unknown.
    beside = {path: why for path, why in broken.items() if any(path.parent == known.parent for known in run.files)}
    for _, path in sorted(run.checkpoints, reverse=True):
        try:
            PrivateCheckpointIO().load_checkpoint(path, weights_only=weights_only)
        except DataError as error:
            beside[path] = str(error)
            continue
        if beside:
            rank_zero_warn(f"Resuming from {path}, which loads. {_listed(beside)}")
        return Start(str(path))
    if beside:
        raise ConfigurationError(
            f"The run has no checkpoint that can be loaded. {_listed(beside)} To restart it, with its steps counted "
            "as spent, move these files away."
        )
    journal = max(run.journals, key=lambda path: path.stat().st_mtime)
    rank_zero_warn(
        f"The run of {journal} was stopped before its first checkpoint. Its weights are lost, and its steps are spent: "
        "they count in this fit, which starts from new weights. For a run with its own ledger, leave ckpt_path out."
    )
    return Start(journal=journal)


def _listed(broken: dict[Path, str]) -> str:
    return " ".join(f"{path.name} does not load: {why.rstrip('.')}." for path, why in sorted(broken.items()))


def _runs_in(folders: Iterable[Path], weights_only: bool | None) -> tuple[dict[str, _Run], dict[Path, str]]:
    """The runs with files in these folders, and the checkpoints that cannot be read, each with the reason."""
    runs: dict[str, _Run] = {}
    broken: dict[Path, str] = {}
    for folder in dict.fromkeys(folders):
        for path in journals_in(folder):
            if b'"step"' in path.read_bytes():
                runs.setdefault(run_of(path), _Run()).journals.append(path)
        for path in sorted(folder.glob("*.ckpt")):
            try:
                checkpoint = PrivateCheckpointIO().peek(path, weights_only)
                if (saved := SavedRun.read(checkpoint)) is None:
                    raise DataError(
                        "it is not a checkpoint of a private run, or its ModelCheckpoint has save_weights_only: true; "
                        "set it to false"
                    )
            except DataError as error:
                broken[path] = str(error)
                continue
            steps = saved.statement.ledger.num_steps, checkpoint["global_step"], path.stat().st_mtime
            runs.setdefault(saved.statement.run, _Run()).checkpoints.append((steps, path))
    return runs, broken


def _folders(trainer: pl.Trainer) -> list[Path]:
    """The folders in which runs of this configuration write checkpoints and journals."""
    given = [
        Path(callback.dirpath)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath
    ]
    roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", logger.save_dir))]
    logs = [folder for root in roots for folder in sorted(root.glob("*")) if folder.is_dir()]
    logs.append(Path(trainer.default_root_dir))
    return [*given, *logs, *(folder / "checkpoints" for folder in logs)]
