"""Files that are either complete or absent, whenever the process or the machine stops."""

import os
import stat
from collections.abc import Callable, Iterator
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


def why_not_own(path: Path, *, others: int, is_kind: Callable[[int], bool] = stat.S_ISREG) -> str | None:
    """What is wrong with the owner, the kind or the mode of a path that nobody else may have written; None if nothing.

    Args:
        others: the permission bits that the path must not have.
        is_kind: tells from a mode whether the path is of the right kind.
    """
    facts = path.lstat()
    if not is_kind(facts.st_mode):
        return "is a link" if stat.S_ISLNK(facts.st_mode) else "is of another kind than what is kept there"
    if facts.st_uid != os.geteuid():
        return "belongs to another user"
    if facts.st_mode & others:
        return f"is open to other users (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


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
