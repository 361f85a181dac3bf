"""Checkpoints that are either complete or absent, and that are read without running code.

A file with a checkpoint's name is always complete. When it is read, the checksums of its parts are verified first.
"""

from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from dp_lightning.atomic_files import replacing, require_regular
from dp_lightning.checksums import damage, newest_intact
from dp_lightning.errors import DataError

# What torch does not accept as data by default: paths and NumPy numbers.
_DATA: list[Any] = [PosixPath, PurePosixPath, WindowsPath, PureWindowsPath, np.float64(0).__reduce__()[0], np.dtype]
_DATA += [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]


class PrivateCheckpointIO(TorchCheckpointIO):
    """Writes and reads checkpoints on a local file system.

    Args:
        before_save: called with a checkpoint and the folder in which it is about to be written.
        problem_of: called with a loaded checkpoint; returns what makes it unusable, or None.
    """

    def __init__(
        self,
        before_save: Callable[[dict[str, Any], Path], None] | None = None,
        problem_of: Callable[[dict[str, Any]], str | None] = lambda checkpoint: None,
    ) -> None:
        super().__init__()
        self._before_save, self._problem_of = before_save, problem_of

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
        self, path: Any, map_location: Any | None = lambda storage, _: storage, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Read a whole checkpoint, without running code that it contains.

        Raises:
            DataError: when it is missing, damaged, foreign or not usable; the message names the newest intact one
                beside it.
        """
        source = _local(path)
        problem = damage(source)
        if problem is None:
            try:
                loaded = _loaded(source, map_location=map_location)
                problem = self._problem_of(loaded)
                if problem is None:
                    return loaded
            except DataError as error:
                problem = str(error)
        others = [path for path in source.parent.glob("*.ckpt") if path != source]
        intact = newest_intact(others, self._is_usable)
        hint = f"The newest intact one beside it is {intact}." if intact else "There is no intact one beside it."
        raise DataError(f"{source} is not a usable checkpoint: {problem}. {hint}")

    def _is_usable(self, path: Path) -> bool:
        try:
            return self._problem_of(_loaded(path)) is None
        except DataError:
            return False

    def peek(self, path: Path) -> dict[str, Any]:
        """The plain values of a checkpoint, without reading its tensors or their checksums, or running code that it
        contains.

        Raises:
            DataError: when it is missing, truncated or foreign.
        """
        return _loaded(_local(path), mmap=True)


def _loaded(source: Path, **how: Any) -> dict[str, Any]:
    require_regular(source)
    try:
        with torch.serialization.safe_globals(_DATA):
            loaded: Any = torch.load(source, weights_only=True, **how)
    except Exception as error:  # it may contain anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"it cannot be loaded without running code ({reason})") from error
    if (misfit := _misfit(loaded)) is not None:
        raise DataError(misfit)
    return loaded


def _misfit(loaded: Any) -> str | None:
    """Why the content is not that of a checkpoint; None if it is."""
    if not isinstance(loaded, dict):
        return f"it holds a {type(loaded).__name__}"
    for name in ("state_dict", "hyper_parameters", "callbacks", "loops"):
        if not isinstance(loaded.get(name, {}), dict):
            return f"its {name} is a {type(loaded[name]).__name__}"
    return None


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise DataError(f"Checkpoints are kept on a local or mounted file system; {path} is not on one.")
    return Path(path)
