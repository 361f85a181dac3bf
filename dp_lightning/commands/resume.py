"""Which checkpoint a ``dpl fit`` goes on from."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.callbacks.interruption import job_folder
from dp_lightning.errors import ConfigurationError
from dp_lightning.strategies.checkpoint_io import newest_intact


def checkpoint_to_resume(trainer: pl.Trainer, asked: str | None) -> str | None:
    """The path for ``trainer.fit(ckpt_path=...)``.

    Args:
        trainer: before its run.
        asked: the setting ``ckpt_path``. ``last`` is the newest intact checkpoint where runs of this configuration
            leave theirs. None is a new run; but a SLURM job that was put back into the queue goes on from its own.

    Raises:
        ConfigurationError: when ``last`` is asked for and there is none.
    """
    if asked is None:
        folder = job_folder(trainer)
        return _newest([folder]) if folder is not None else None
    if asked != "last":
        return asked
    folders = _folders(trainer)
    found = _newest(folders)
    if found is None:
        raise ConfigurationError(
            f"ckpt_path is 'last', and there is no intact checkpoint in {', '.join(map(str, folders))}. "
            "Leave it out to start a new run, or give the path of a checkpoint."
        )
    return found


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


def _newest(folders: list[Path]) -> str | None:
    found = newest_intact(path for folder in folders for path in folder.glob("*.ckpt"))
    return str(found) if found is not None else None
