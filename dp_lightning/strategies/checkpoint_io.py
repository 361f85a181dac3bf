"""Checkpoints that are either complete or absent, and that are read without running code unless that is asked for."""

import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import DataError

# What torch does not accept as data by default: paths and NumPy numbers.
_DATA: list[Any] = [PosixPath, PurePosixPath, WindowsPath, PureWindowsPath, np.float64(0).__reduce__()[0], np.dtype]
_DATA += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]


class PrivateCheckpointIO(TorchCheckpointIO):
    """Writes and reads checkpoints on a local file system.

    Args:
        before_save: is called with a checkpoint and the folder in which that is about to be written.
    """

    def __init__(self, before_save: Callable[[dict[str, Any], Path], None] | None = None) -> None:
        super().__init__()
        self._before_save = before_save

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the whole checkpoint, or leave the file that was there.

        Raises:
            DataError: when the checkpoint cannot be written.
        """
        target = Path(path)
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
            DataError: when the checkpoint is missing or damaged.
        """
        source, weights_only = Path(path), weights_only is not False
        try:
            with torch.serialization.safe_globals(_DATA):
                loaded: dict[str, Any] = torch.load(source, map_location=map_location, weights_only=weights_only)
        except Exception as error:  # the file may contain anything
            text = str(error).rpartition("WeightsUnpickler error: ")[2]  # torch names the class behind its advice
            runs_code = weights_only and isinstance(error, pickle.UnpicklingError)
            hint = "; if it is your own, pass weights_only=False with ckpt_path" if runs_code else ""
            reason = next(iter(text.splitlines()), type(error).__name__)
            raise DataError(f"{source} cannot be loaded ({reason}){hint}.") from error
        return loaded
