"""Which checkpoint ``ckpt_path: last`` means."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


def latest_checkpoint(trainer: pl.Trainer, weights_only: bool | None = None) -> str | None:
    """The newest checkpoint of a private run in the folders where runs of this configuration leave checkpoints.

    A checkpoint that cannot be loaded is skipped with a warning.

    Args:
        trainer: a trainer before its run.
        weights_only: as `PrivateCheckpointIO` takes it.

    Returns:
        The path of the checkpoint; None, with a warning, where there is no checkpoint.

    Raises:
        ConfigurationError: when there are checkpoints, and none of them can be loaded.
    """
    folders = _folders(trainer)
    paths = {path for folder in folders for path in folder.glob("*.ckpt")}
    broken = ""
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path), reverse=True):
        try:
            if SavedRun.read(PrivateCheckpointIO().load_checkpoint(path, weights_only=weights_only)) is None:
                raise DataError(
                    f"{path} is not a checkpoint of a private run, or its ModelCheckpoint has save_weights_only: true."
                )
        except DataError as error:
            broken += f" {path.name} does not load: {error}"
            continue
        if broken:
            rank_zero_warn(f"Resuming from {path}, which loads.{broken}")
        return str(path)
    if broken:
        raise ConfigurationError(f"ckpt_path is 'last', but no checkpoint can be loaded.{broken}")
    rank_zero_warn(
        f"ckpt_path is 'last', but there is no checkpoint in {', '.join(map(str, folders))}: this is a new run. If you "
        "meant another one, stop here and give its checkpoint, or its trainer.default_root_dir."
    )
    return None


def _folders(trainer: pl.Trainer) -> list[Path]:
    """The folders in which runs of this configuration write checkpoints."""
    given = [
        Path(callback.dirpath)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath
    ]
    roots = [Path(root) for logger in trainer.loggers if (root := getattr(logger, "root_dir", logger.save_dir))]
    logs = [folder for root in roots for folder in sorted(root.glob("*")) if folder.is_dir()]
    logs.append(Path(trainer.default_root_dir))
    return [*given, *logs, *(folder / "checkpoints" for folder in logs)]
