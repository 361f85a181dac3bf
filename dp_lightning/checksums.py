"""Whether a checkpoint is complete, judged only by its checksums."""

import stat
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path


def damage(path: Path) -> str | None:
    """What is wrong with the file, as far as its checksums show; None if nothing is."""
    try:
        _require_regular(path)
        with zipfile.ZipFile(path) as file:
            claimed, there = sum(part.file_size for part in file.infolist()), path.stat().st_size
            # torch does not compress: a file that is small here and large in memory was not written by it.
            if claimed > there:
                return f"its parts claim {claimed:,} bytes, but it has {there:,}"
            broken = file.testzip()
    except FileNotFoundError:
        return "there is no such file"
    except Exception as error:  # zipfile raises many kinds for a damaged file
        return f"it is truncated or not a checkpoint ({error})"
    return None if broken is None else f"its part {broken} is damaged"


def _require_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe without a writer would block
        raise OSError("it is not a regular file")


def newest_intact(checkpoints: Iterable[Path], accept: Callable[[Path], bool] = lambda path: True) -> Path | None:
    """The newest of these checkpoints whose checksums match and that ``accept`` accepts; older ones are not read."""
    files = sorted(checkpoints, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in files if damage(path) is None and accept(path)), None)
