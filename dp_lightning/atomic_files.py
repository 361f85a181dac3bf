"""Files that are either complete or absent, whenever the process or the machine stops."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from dp_lightning.errors import ConfigurationError


def require_writable(folder: Path, setting: str) -> None:
    """Check now, rather than after the first step, that ``folder`` can be written to; creates it if missing.

    Raises:
        ConfigurationError: naming the setting.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{setting} is {folder}, but nothing can be written there ({error.strerror}). Choose another folder."
        ) from error


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Write ``path`` under a temporary name in its folder; it is renamed when it is complete and on disk.

    If writing fails, the file that was there stays.

    Args:
        private: only the user can read and write it, whatever the umask.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
