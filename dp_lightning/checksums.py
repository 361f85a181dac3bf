"""Which checkpoint is complete, judged by its checksums alone: the experiments import no torch."""

import zipfile
from collections.abc import Iterable
from pathlib import Path


def newest_intact(checkpoints: Iterable[Path]) -> Path | None:
    """The newest of these checkpoints whose checksums match; older ones are not read."""
    files = sorted(checkpoints, key=lambda path: path.stat().st_mtime, reverse=True)
    return next(filter(_is_intact, files), None)


def _is_intact(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except Exception:  # zipfile raises many kinds for a damaged file
        return False
