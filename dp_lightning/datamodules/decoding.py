"""Decodes one image file: its values, turned as a viewer shows them, and what of them is black and white.

Pillow reads all formats but DICOM. More than 8 bits are read of grey PNG, TIFF and DICOM files; others are refused,
since Pillow scales their values or squeezes them into 8 bits.
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional

from dp_lightning.errors import ConfigurationError, DataError

#: The raw values that are black and white.
Window = tuple[float, float]
#: Names of DICOM files end so.
DICOM_EXTENSIONS = (".dcm", ".dicom")
# Files are chosen by their extensions, but PIL goes by the content, and some of its formats start programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF", "JPEG2000")
# Tags of TIFF files: the bits of each channel, and what the lowest value means, which is white for 0.
_BITS, _PHOTOMETRIC = 258, 262
# Fewer levels of grey than these hide most of an image.
_FEW_LEVELS = 32
# The marker before the size of a JPEG 2000 image (ISO 15444-1); the field Ssiz of the first channel is 42 bytes on.
_SIZ, _SSIZ = b"\xff\x4f\xff\x51", 42


def open_image(path: str, window: Window | None = None) -> Tensor:
    """Decode one image file: uint8 (3, H, W), turned as its EXIF orientation says.

    Args:
        window: The values in the file that become 0 and 255; those between them are scaled and rounded, and others
            are clipped. None keeps the values of files of 8 bits.

    Raises:
        ConfigurationError: A file has more than 8 bits and there is no window, the window is empty, or pydicom is
            missing.
        ValueError: The file is missing, empty, truncated, not an image, or has more pixels than Pillow reads; the
            message says which, without the path.
    """
    values, inverted = read_pixels(path)
    image = torch.from_numpy(windowed(values, window, inverted=inverted))
    return image.expand(3, -1, -1) if image.ndim == 2 else image.permute(2, 0, 1)


def windowed(values: np.ndarray, window: Window | None, *, inverted: bool = False) -> np.ndarray:
    """Return values as uint8: those of the window's ends become 0 and 255, or 255 and 0 if ``inverted``.

    Raises:
        ConfigurationError: The values have more than 8 bits and there is no window, or the window is empty.
    """
    if window is not None:
        low, high = window
        if not -np.inf < low < high < np.inf:
            raise ConfigurationError(f"window is {list(window)}; give the value that is black, then a higher one")
        scaled = np.rint((values.astype(np.float64) - low) / (high - low) * 255).clip(0, 255).astype(np.uint8)
    elif values.dtype == np.uint8:
        scaled = values
    else:
        raise ConfigurationError(
            f"it has more than 8 bits, with values from {values.min():,g} to {values.max():,g}, and does not say which "
            "of them are black and white. Set window: [black, white] of the data, by what is known of such images, as "
            "[-160, 240] Hounsfield units for soft tissue. `dpl init` shows the range of all training images"
        )
    return 255 - scaled if inverted else scaled


def require_levels(window: Window, low: int, high: int, where: str) -> None:
    """Warn if images have few levels of grey in their window, from ``low`` to ``high`` of 0 to 255.

    Raises:
        DataError: They have one level.
    """
    said = (
        f"With window {list(window)}, {where} have {{}} of 256 levels of grey, and little can be told apart. Set a "
        "window around the values that matter, in the units of the files; `dpl init` prints their range."
    )
    if low == high:
        raise DataError(said.format("one"))
    if high - low < _FEW_LEVELS:
        rank_zero_warn(said.format(f"fewer than {_FEW_LEVELS}"))


def read_pixels(path: str) -> tuple[np.ndarray, bool]:
    """Read the values of one image file, turned as its EXIF orientation says, and whether low values are white.

    They are (H, W) if the image is grey, or (H, W, 3) in RGB, of a type other than uint8 if they have more than 8 bits.

    Raises:
        ConfigurationError: pydicom is missing.
        ValueError: as of `open_image`.
    """
    try:
        values, inverted = _dicom(path) if path.lower().endswith(DICOM_EXTENSIONS) else _by_pillow(path)
        require_finite(values, "it")
        return values, inverted
    except ConfigurationError:
        raise
    except UnidentifiedImageError as error:  # its message repeats the path
        what = "not an image of a known format, or its values are of a type that Pillow does not read"
        raise ValueError(f"it is {what if Path(path).stat().st_size else 'empty'}") from error
    except Exception as error:  # each format raises its own, and a damaged file any
        raise ValueError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def require_finite(values: np.ndarray, where: str) -> None:
    """Raise a DataError for a value that has no place in any window."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{where} has values that are not finite numbers; replace them by numbers")


def fitted(image: Tensor, *, shorter_side: int, size: int, in_channels: int) -> Tensor:
    """Resize the shorter side of uint8 (3, H, W) and cut out the centre: uint8 (``in_channels``, size, size)."""
    if min(image.shape[1:]) != shorter_side:
        image = functional.resize(image, [shorter_side])
    if image.shape[1:] != (size, size):
        image = functional.center_crop(image, [size])
    return luma(image) if in_channels == 1 else image


def luma(image: Tensor) -> Tensor:
    """Return the luma of uint8 (3, H, W) by ITU-R 601, rounded, so that grey stays unchanged: uint8 (1, H, W)."""
    red, green, blue = image.to(torch.int32)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(0)


def _by_pillow(path: str) -> tuple[np.ndarray, bool]:
    # Given a path, Pillow 13 maps TIFF files into memory, and those that lie on their side wrongly.
    with open(path, "rb") as file, Image.open(file, formats=_FORMATS) as image:
        is_deep = is_deep_grey = image.mode in ("I", "F") or image.mode.startswith("I;16")
        arguments = image.tile[0].args if image.tile else None  # of the decoder, as far as it has been opened
        inverted = False
        if image.format == "TIFF":
            tags = image.tag_v2  # type: ignore[attr-defined]
            is_deep, inverted = max(tags.get(_BITS, (1,))) > 8, tags.get(_PHOTOMETRIC) == 0
        elif image.format == "PNG":
            is_deep = "16" in str(arguments)
        elif image.format == "JPEG2000":
            data = Path(path).read_bytes()
            is_deep = data[data.index(_SIZ) + _SSIZ] & 0x7F > 7  # one bit less than there are; another for the sign
        elif image.format == "PPM" and isinstance(arguments, tuple):
            is_deep = is_deep or int(arguments[-1]) > 255
        if is_deep and not (is_deep_grey and image.format in ("PNG", "TIFF")):
            raise ValueError("it has more than 8 bits, which are read of grey PNG, TIFF and DICOM files; convert it")
        image.load()
        with suppress(SyntaxError):  # EXIF data that is no EXIF turns nothing
            ImageOps.exif_transpose(image, in_place=True)
        if is_deep:
            return np.array(image), inverted
        mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
        return np.array(image if image.mode == mode else image.convert(mode)), False


def _dicom(path: str) -> tuple[np.ndarray, bool]:
    """Read a DICOM file with one image: the values after rescale slope and intercept."""
    if find_spec("pydicom") is None:
        raise ConfigurationError("it is a DICOM file, which needs pydicom: pip install 'dp-lightning[dicom]'")
    from pydicom import dcmread
    from pydicom.pixels import apply_modality_lut, pixel_array

    data = dcmread(path)
    if int(data.get("NumberOfFrames") or 1) > 1:
        raise ValueError("it holds several images; write each into a file of its own")
    if (kind := data.PhotometricInterpretation) == "PALETTE COLOR":
        raise ValueError("its colours are those of a palette; convert it to PNG")
    stored = pixel_array(data)  # in RGB, if it has colours
    rescaled = apply_modality_lut(stored, data)
    same = np.array_equal(stored, rescaled)  # 8 bits stay 8 bits
    return np.array(stored if same else rescaled), kind == "MONOCHROME1"
