"""Checkpoints that are either complete or absent, and that are read without running code unless that is asked for.

A file with a checkpoint's name is always complete. When it is read, the checksums of its parts are verified first.
"""

from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from dp_lightning.atomic_files import replacing
from dp_lightning.checksums import damage, newest_intact
from dp_lightning.errors import DataError

# What torch does not accept as data by default: paths and NumPy numbers.
_DATA: list[Any] = [PosixPath, PurePosixPath, WindowsPath, PureWindowsPath, np.float64(0).__reduce__()[0], np.dtype]
_DATA += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]


class PrivateCheckpointIO(TorchCheckpointIO):
    """Writes and reads checkpoints on a local file system.

    Args:
        before_save: called with a checkpoint and the folder in which it is about to be written.
    """

    def __init__(self, before_save: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        super().__init__()
        self._before_save = before_save

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the whole checkpoint, or leave the file that was there.

        Raises:
            DataError: when it cannot be written.
        """
        target = _local(path)
        if self._before_save is not None:
            self._before_save(checkpoint, target.parent)
        try:
            with replacing(target) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError.
            raise DataError(
                f"The checkpoint {target} cannot be written ({str(error).splitlines()[0]}). Earlier checkpoints are as "
                "they were. Free some space, or choose another folder, and resume from the newest one."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any | None = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint.

        Args:
            weights_only: False also reads objects that only code can make, such as an enum among the hyperparameters,
                and runs that code; None is True.

        Raises:
            DataError: when it is missing, damaged or foreign; the message names the newest intact one beside it.
        """
        source = _local(path)
        if (problem := damage(source)) is None:
            try:
                return _loaded(source, weights_only, map_location=map_location)
            except DataError as error:
                problem = str(error)
        intact = newest_intact(other for other in source.parent.glob("*.ckpt") if other != source)
        hint = f"The newest intact one beside it is {intact}." if intact else "There is no intact one beside it."
        raise DataError(f"{source} is not a usable checkpoint: {problem}. {hint}")


def _loaded(source: Path, weights_only: bool | None, **how: Any) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_DATA):
            loaded: Any = torch.load(source, weights_only=weights_only is not False, **how)
    except Exception as error:  # it may contain anything
        text = str(error).rpartition("WeightsUnpickler error: ")[2]  # which names the class, behind advice of torch
        reason = next(iter(text.splitlines()), type(error).__name__)
        if weights_only is False:
            raise DataError(f"it cannot be loaded ({reason})") from error
        raise DataError(
            f"it cannot be loaded without running code ({reason}); if it is your own, pass weights_only=False with "
            "ckpt_path"
        ) from error
    if not isinstance(loaded, dict):
        raise DataError(f"it holds a {type(loaded).__name__}")
    return loaded


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise DataError(f"Checkpoints are kept on a local or mounted file system; {path} is not on one.")
    return Path(path)
