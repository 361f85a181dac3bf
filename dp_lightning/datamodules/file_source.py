"""Labelled image files, read when they are needed: a million of them take only the memory of their names."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from dp_lightning.datamodules.decoding import DICOM_EXTENSIONS, Window, open_image, require_levels
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import Group

#: Names of images end so; of an animation the first image is read.
IMAGE_EXTENSIONS = (*IMG_EXTENSIONS, ".gif", ".jp2", ".j2k", *DICOM_EXTENSIONS)
#: A data set with fewer files is read before a run unless it says otherwise.
READ_FIRST_BELOW = 20_000
# Number of bad files that an error names.
_NAMED = 10

_Found = TypeVar("_Found")


class FileSource:
    """Images read from files when they are needed; every kind of image is converted to RGB.

    Args:
        paths: The N files.
        labels: int64 (N,).
        persons: The person of each file; None if the data does not identify persons.
        window: The values in the files that are black and white; None for files of 8 bits.
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Tensor,
        persons: list[Group] | None = None,
        window: Window | None = None,
    ) -> None:
        # Worker processes share an array, and would copy a list: reading an object changes its reference count.
        self.paths: Sequence[str] = np.array(paths, dtype=np.str_)  # type: ignore[assignment]
        self.labels, self.persons, self.window = labels, persons, window
        # The place and the image of the last file, which is decoded once for several views in a row.
        self._decoded = (-1, torch.empty(0))

    def read(self, index: int) -> Tensor:
        decoded = self._decoded
        if index != decoded[0]:
            path = self.paths[index]
            try:
                self._decoded = decoded = index, open_image(path, self.window)
            except ValueError as error:
                raise DataError(
                    f"{path} cannot be read as an image ({error}). The setting read_first: true of the data finds all "
                    "such files before a run begins"
                ) from error
        return decoded[1]

    def digest(self, indices: Tensor) -> bytes:
        """Return a digest of the name, the size and the modification time of each file; no file is read."""
        found = hashlib.sha256()
        for path in (self.paths[index] for index in indices.tolist()):
            facts = os.stat(path)
            found.update(os.fsencode(f"{os.path.basename(path)}/{facts.st_size}/{facts.st_mtime_ns}/"))
        return found.digest()


def each_file(look: Callable[[str], _Found], paths: Sequence[str], where: str) -> Iterator[_Found]:
    """Yield what ``look`` returns for each file, in order, with a bar if standard error is a terminal.

    Decoders release Python's lock for most of their time, so threads read in parallel.
    """
    with ThreadPool() as pool:
        found = pool.imap(look, paths, chunksize=16)
        yield from tqdm(found, total=len(paths), desc=f"Reading {where}", unit="file", disable=None)


def require_readable(paths: Sequence[str], where: str, window: Window | None) -> None:
    """Decode every file, with the ``window`` of the data; a window that leaves few levels of grey is named.

    Raises:
        DataError: Some cannot be read; the message names up to ten of them, or the first that lacks a setting.
    """

    levels: list[tuple[int, int]] = []

    def problem_of(path: str) -> str:
        try:
            image = open_image(path, window)
        except ConfigurationError as error:
            raise DataError(f"{path}: {error}.") from error
        except ValueError as error:
            return str(error)
        levels.append((int(image.min()), int(image.max())))
        return ""

    found = [(path, why) for path, why in zip(paths, each_file(problem_of, paths, where), strict=True) if why]
    if found:
        raise DataError(
            f"{len(found)} of {len(paths):,} files in {where} cannot be read; replace or remove them."
            f"{' `dpl init` lists all of them.' if len(found) > _NAMED else ''}\n{listed(found)}"
        )
    if window is not None and levels:
        low, high = min(low for low, _ in levels), max(high for _, high in levels)
        require_levels(window, low, high, f"the images of {where}")


def listed(bad: Sequence[tuple[str, str]]) -> str:
    """Return the first ten of these files, a line each with the reason."""
    lines = [f"  {path}: {why}" for path, why in bad[:_NAMED]]
    return "\n".join([*lines, *([f"  and {len(bad) - _NAMED:,} more"] if len(bad) > _NAMED else [])])
