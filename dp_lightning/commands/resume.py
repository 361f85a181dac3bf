"""Which checkpoint a ``dpl fit`` goes on from."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.callbacks.interruption import earlier_start
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.intact import newest_intact
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


def checkpoint_to_resume(trainer: pl.Trainer, asked: str | None) -> str | None:
    """The path for ``trainer.fit(ckpt_path=...)``.

    Args:
        trainer: before its run.
        asked: the setting ``ckpt_path``. ``last`` is the newest intact checkpoint where runs of this configuration
            leave theirs. None is a new run. A SLURM job that was put back into the queue goes on from its own newest
            one, whatever was asked when it was submitted.

    Raises:
        ConfigurationError: when ``last`` is asked for and there is none.
    """
    if (earlier := earlier_start(trainer)) is not None:
        folder, run = earlier
        found = newest_intact(folder.glob("*.ckpt"), lambda path: _run_of(path) == run)
        if found is not None:
            return str(found)
    if asked != "last":
        return asked
    folders = _folders(trainer)
    found = newest_intact(path for folder in folders for path in folder.glob("*.ckpt"))
    if found is None:
        raise ConfigurationError(
            f"ckpt_path is 'last', and there is no intact checkpoint in {', '.join(map(str, folders))}. "
            "Leave it out to start a new run, or give the path of a checkpoint."
        )
    return str(found)


def _run_of(path: Path) -> str | None:
    """Name of the private run that has written a checkpoint; None for a file of another kind."""
    try:
        saved = PrivateCheckpointIO().load_checkpoint(path)
    except DataError:
        return None
    name = saved.get("callbacks", {}).get("PrivacyCallback", {}).get("run")
    return name if isinstance(name, str) else None


def _folders(trainer: pl.Trainer) -> list[Path]:
    given = [
        Path(callback.dirpath)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath
    ]
    if given:
        return given
    roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", logger.save_dir))]
    found = [folder for root in roots for folder in sorted(root.glob("*/checkpoints"))]
    return [*found, Path(trainer.default_root_dir) / "checkpoints"]
