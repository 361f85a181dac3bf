"""Labelled image files, read when they are needed: a million of them take only the memory of their names."""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_jpeg, read_file

from dp_lightning.datamodules.dataset import Transform
from dp_lightning.errors import DataError

#: Most pixels of an image, checked in its header before it is decoded: 8192 x 8192. Decoding takes up to 14 bytes for
#: each.
MOST_PIXELS = 2**26
#: Names of images end so; of an animation the first image is read.
IMAGE_EXTENSIONS = (*IMG_EXTENSIONS, ".gif")
# Files are chosen by their extensions, but PIL goes by the content, and some of its formats start programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
_JPEG_START, _JPEG_END = [0xFF, 0xD8], [0xFF, 0xD9]
_COMPRESSED = (".jpg", ".jpeg", ".png", ".webp")


class FileNames(Dataset[str]):
    """Paths in one block of memory, which worker processes share with the main process.

    A list of strings would be copied page by page, since reading an object changes its reference count. Since this is a
    data set, it cannot be read while a loss is computed, however few paths it holds.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        text, ends = bytearray(), array("q", [0])
        for path in paths:
            text += os.fsencode(path)
            ends.append(len(text))
        self._text, self._ends = np.frombuffer(text, dtype=np.uint8), np.frombuffer(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._text[self._ends[index] : self._ends[index + 1]].tobytes())


class FileSource:
    """Images read from files when they are needed; every kind of image is converted to RGB.

    Args:
        paths: The N files.
        labels: int64 (N,).
        size: Height and width in pixels, if the data set has a fixed size; images of another size are refused.
    """

    def __init__(self, paths: Iterable[str] | FileNames, labels: Tensor, *, size: int | None = None) -> None:
        self.paths = paths if isinstance(paths, FileNames) else FileNames(paths)
        self.labels, self.size = labels, size

    def read(self, indices: Sequence[int], transform: Transform | None) -> Tensor:
        images: list[Tensor] = []
        for position, index in enumerate(indices):
            if position == 0 or index != indices[position - 1]:
                image = open_rgb(self.paths[index])
                if self.size is not None and image.shape[1:] != (self.size, self.size):
                    raise DataError(
                        f"{self.paths[index]} has {image.shape[2]} x {image.shape[1]} pixels, but images of this data "
                        f"set have {self.size} x {self.size}; replace the file"
                    )
            images.append(image if transform is None else transform(image))
            if images[-1].shape != images[0].shape:
                raise DataError(
                    f"{self.paths[index]} has shape {tuple(images[-1].shape)} and {self.paths[indices[0]]} "
                    f"{tuple(images[0].shape)} (channels, height, width); all images must have the same size"
                )
        return torch.stack(images)

    def digest(self, indices: Tensor) -> bytes:
        """A digest of the sizes of compressed files, and of the content of others, whose size does not depend on their
        pixels."""
        found = hashlib.sha256()
        for path in map(self.paths.__getitem__, indices.tolist()):
            found.update(os.path.getsize(path).to_bytes(8, "little"))
            if not path.lower().endswith(_COMPRESSED):
                with open(path, "rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
        return found.digest()


def grey(image: Tensor) -> Tensor:
    """Luma of uint8 (3, H, W) by ITU-R 601, rounded, so that grey stays unchanged: uint8 (1, H, W)."""
    red, green, blue = image.to(torch.int32)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(0)


def open_rgb(path: str) -> Tensor:
    """Decode one image file: uint8 (3, H, W).

    Raises:
        DataError: As ``decode``; the message names the file.
    """
    try:
        return decode(path)
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read as an image ({error}); replace the file or remove it. "
            "data.init_args.read_first: true finds all such files before a run begins"
        ) from error


def decode(path: str) -> Tensor:
    """Decode one image file: uint8 (3, H, W).

    Raises:
        ValueError: The file is missing, empty, truncated, not an image, has more than ``MOST_PIXELS`` or 32 bits per
            pixel; the message says which, without the path.
    """
    try:
        return _decoded(path)
    except Exception as error:  # each format raises its own, and a damaged file any
        raise ValueError(_reason(path, error)) from error


def _decoded(path: str) -> Tensor:
    with Image.open(path, formats=_FORMATS) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"its header says {width:,} x {height:,} pixels; at most {MOST_PIXELS:,} are read")
        if image.format in ("JPEG", "MPO") and os.path.getsize(path) <= 4 * MOST_PIXELS:
            content = read_file(path)
            # A JPEG without its end is left to PIL, which refuses it; libjpeg would fill the rest with grey.
            if content[:2].tolist() == _JPEG_START and content[-2:].tolist() == _JPEG_END:
                with suppress(RuntimeError):  # PIL says what is wrong
                    return decode_jpeg(content, mode=ImageReadMode.RGB)
        if image.mode in ("I", "F"):
            raise ValueError(
                "it has 32 bits per pixel, so it is unknown which value is white; convert it to 8 or 16 bits"
            )
        # PIL would clip 16-bit values at 255.
        shown = _eight_bits(image) if image.mode.startswith("I;16") else image
        shown = shown if shown.mode == "RGB" else shown.convert("RGB")
        return torch.from_numpy(np.array(shown)).permute(2, 0, 1)


def _reason(path: str, error: Exception) -> str:
    """Why a file cannot be decoded, in a few words."""
    if isinstance(error, UnidentifiedImageError):  # its message repeats the path
        return "it is not an image of a known format" if os.path.getsize(path) else "it is empty"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _eight_bits(image: Image.Image) -> Image.Image:
    """A 16-bit grey image as an 8-bit one: 0 to 65,535 becomes 0 to 255."""
    grey = np.asarray(image).astype(np.float32) / 257
    return Image.fromarray(grey.round().astype(np.uint8))
