"""Labelled image files, read when they are needed: a million of them take only the memory of their names.

Only ``open_image`` decodes a file.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from dp_lightning.datamodules.dataset import Transform
from dp_lightning.errors import DataError
from dp_lightning.privacy.person_ids import Group

#: Names of images end so; of an animation the first image is read.
IMAGE_EXTENSIONS = (*IMG_EXTENSIONS, ".gif")
#: A data set with fewer files is read before a run unless it says otherwise.
READ_FIRST_BELOW = 20_000
# Files are chosen by their extensions, but PIL goes by the content, and some of its formats start programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
# Number of bad files that an error names.
_NAMED = 10

_Found = TypeVar("_Found")


class FileSource:
    """Images read from files when they are needed; every kind of image is converted to RGB.

    Args:
        paths: The N files.
        labels: int64 (N,).
        persons: The person of each file; None if the data does not identify persons.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, persons: list[Group] | None = None) -> None:
        self.paths, self.labels, self.persons = FileNames(paths), labels, persons

    def read(self, indices: Sequence[int], transform: Transform | None) -> Tensor:
        images: list[Tensor] = []
        for position, index in enumerate(indices):
            path = self.paths[index]
            if position == 0 or index != indices[position - 1]:
                try:
                    image = open_image(path)
                except ValueError as error:
                    raise DataError(
                        f"{path} cannot be read as an image ({error}); replace it or remove it. The setting "
                        "read_first: true of the data finds all such files before a run begins"
                    ) from error
            images.append(image if transform is None else transform(image))
        return torch.stack(images)

    def digest(self, indices: Tensor) -> bytes:
        """Return a digest of the name, the size and the modification time of each file; no file is read."""
        found = hashlib.sha256()
        for path in (self.paths[index] for index in indices.tolist()):
            facts = os.stat(path)
            found.update(os.fsencode(f"{os.path.basename(path)}/{facts.st_size}/{facts.st_mtime_ns}/"))
        return found.digest()


class FileNames(Sequence[str]):
    """Paths in one array, which worker processes share with the main process.

    A list of strings would be copied page by page, since reading an object changes its reference count.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._names = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        return os.fsdecode(self._names[index])


def open_image(path: str) -> Tensor:
    """Decode one image file: uint8 (3, H, W).

    Raises:
        ValueError: The file is missing, empty, truncated, not an image, has 32 bits per pixel, or more pixels than
            Pillow reads; the message says which, without the path.
    """
    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.mode in ("I", "F"):
                raise ValueError(
                    "it has 32 bits per pixel, so it is unknown which value is white; convert it to 8 or 16 bits"
                )
            if image.mode.startswith("I;16"):  # PIL would clip the values at 255; here 0 to 65,535 becomes 0 to 255
                grey = (np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8)
                return torch.from_numpy(grey).expand(3, -1, -1)
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except UnidentifiedImageError as error:  # its message repeats the path
        raise ValueError("it is not an image of a known format" if os.path.getsize(path) else "it is empty") from error
    except Exception as error:  # each format raises its own, and a damaged file any
        raise ValueError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def luma(image: Tensor) -> Tensor:
    """Return the luma of uint8 (3, H, W) by ITU-R 601, rounded, so that grey stays unchanged: uint8 (1, H, W)."""
    red, green, blue = image.to(torch.int32)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(0)


def each_file(look: Callable[[str], _Found], paths: Sequence[str], where: str) -> Iterator[_Found]:
    """Yield what ``look`` returns for each file, in order, with a bar if standard error is a terminal.

    Decoders release Python's lock for most of their time, so threads read in parallel.
    """
    with ThreadPool() as pool:
        found = pool.imap(look, paths, chunksize=16)
        yield from tqdm(found, total=len(paths), desc=f"Reading {where}", unit="file", disable=None)


def require_readable(paths: Sequence[str], where: str) -> None:
    """Decode every file.

    Raises:
        DataError: Some cannot be read; the message names up to ten of them.
    """

    def problem_of(path: str) -> str:
        try:
            open_image(path)
        except ValueError as error:
            return str(error)
        return ""

    found = [(path, why) for path, why in zip(paths, each_file(problem_of, paths, where), strict=True) if why]
    if found:
        raise DataError(
            f"{len(found)} of {len(paths):,} files in {where} cannot be read; replace or remove them."
            f"{' `dpl init` lists all of them.' if len(found) > _NAMED else ''}\n{listed(found)}"
        )


def listed(bad: Sequence[tuple[str, str]]) -> str:
    """Return the first ten of these files, a line each with the reason."""
    lines = [f"  {path}: {why}" for path, why in bad[:_NAMED]]
    return "\n".join([*lines, *([f"  and {len(bad) - _NAMED:,} more"] if len(bad) > _NAMED else [])])
