"""Reads every file of a data set before a run, in parallel threads, so that all bad files are found at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

from dp_lightning.datamodules.file_source import FileNames, decode
from dp_lightning.errors import DataError
from dp_lightning.foreign_text import printable

#: A data set with fewer files is read before a run unless it says otherwise.
READ_FIRST_BELOW = 20_000
# Files that a thread takes at once.
_PER_PIECE = 16
_MOST_THREADS = 16
# Bad files that an error names.
_NAMED = 10

_Found = TypeVar("_Found")


def each_file(look: Callable[[str], _Found], paths: FileNames, where: str) -> Iterator[_Found]:
    """What ``look`` returns for each file, in order; the progress is shown if standard error is a terminal.

    Decoders release Python's lock for most of their time, so threads read in parallel.
    """
    pieces = [range(start, min(start + _PER_PIECE, len(paths))) for start in range(0, len(paths), _PER_PIECE)]

    def look_at(piece: Sequence[int]) -> list[_Found]:
        return [look(paths[index]) for index in piece]

    with (
        ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool,
        tqdm(total=len(paths), desc=f"Reading {where}", unit="file", disable=None) as bar,
    ):
        for found in pool.map(look_at, pieces):
            bar.update(len(found))
            yield from found


def problem_of(path: str) -> str | None:
    """Why a file cannot be decoded, in a few words; None if it can."""
    try:
        decode(path)
    except ValueError as error:
        return str(error)
    return None


def require_readable(paths: FileNames, where: str) -> None:
    """Decode every file.

    Raises:
        DataError: Some cannot be read; the message names up to ten of them.
    """
    found = [(path, why) for path, why in zip(paths, each_file(problem_of, paths, where), strict=True) if why]
    if found:
        raise DataError(
            f"{len(found)} of {len(paths):,} files in {where} cannot be read; replace or remove them."
            f"{' `dpl init` writes the whole list to a file.' if len(found) > _NAMED else ''}\n{listed(found)}"
        )


def listed(bad: Sequence[tuple[str, str]]) -> str:
    """The first ten of these files, a line each with the reason."""
    lines = [f"  {printable(path)}: {printable(why)}" for path, why in bad[:_NAMED]]
    return "\n".join([*lines, *([f"  and {len(bad) - _NAMED:,} more"] if len(bad) > _NAMED else [])])
