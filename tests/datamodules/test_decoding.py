"""Values of any depth: what is read of a file, what a window makes of it, and how an image is turned."""

import re
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from depths import OFFSET, dicom, npz, pillow, png, pnm, slices, tiff, tree
from PIL import Image

from dp_lightning.datamodules import ImageFiles, ImageFolder, NpzImages
from dp_lightning.datamodules.decoding import open_image, read_pixels
from dp_lightning.errors import ConfigurationError, DataError

RAW = slices(1, np.random.default_rng(0), lesion=True)[0][:, :20]
COLOUR = np.random.default_rng(1).integers(0, 4096, (6, 5, 3)).astype(np.uint16)
HU = RAW.astype(np.int16) - OFFSET


def in_dicom(*arguments, **settings):
    needed = pytest.mark.skipif(find_spec("pydicom") is None, reason="pydicom is an extra")
    return pytest.param(*arguments, settings, marks=needed)


@pytest.mark.parametrize(
    ("name", "write", "stored", "values", "settings"),
    [
        ("a.png", pillow, RAW, RAW, {}),
        ("a.tif", pillow, RAW, RAW, {}),
        ("a.tif", pillow, RAW, RAW, {"compression": "tiff_lzw"}),
        ("a.tif", tiff, RAW, RAW, {"order": ">"}),
        ("a.tif", tiff, HU, HU, {}),
        ("a.tif", tiff, HU, HU, {"order": ">"}),
        ("a.tif", tiff, HU.astype(np.int32) * 1000, HU.astype(np.int32) * 1000, {}),
        ("a.tiff", pillow, HU / np.float32(7), HU / np.float32(7), {}),
        in_dicom("a.dcm", dicom, RAW, HU),
        in_dicom("a.DCM", dicom, RAW, RAW, intercept=0),
        in_dicom("a.dicom", dicom, HU, HU * 0.5 + 3, slope=0.5, intercept=3),
    ],
)
def test_every_value_of_a_file_is_read_and_a_window_makes_256_levels_of_those_in_it(
    tmp_path, name, write, stored, values, settings
):
    write(tmp_path / name, stored, **settings)
    found, inverted = read_pixels(str(tmp_path / name))
    assert np.array_equal(found, values)
    assert not inverted
    low, high = np.percentile(values, [5, 95])
    expected = np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    image = open_image(str(tmp_path / name), (low, high)).numpy()
    assert (image.dtype, image.shape) == (np.uint8, (3, *values.shape[:2]))
    assert np.array_equal(image, np.broadcast_to(np.moveaxis(np.atleast_3d(expected), 2, 0), image.shape))
    with pytest.raises(ConfigurationError) as told:
        open_image(str(tmp_path / name))
    assert f"values from {values.min():,g} to {values.max():,g}, and does not say which" in str(told.value)
    assert "Set window: [black, white] of the data" in str(told.value)


@pytest.mark.parametrize(
    ("name", "write", "stored", "settings"),
    [
        ("a.tif", tiff, RAW, {"white_is_zero": True}),
        in_dicom("a.dcm", dicom, RAW, intercept=0, photometric="MONOCHROME1"),
        in_dicom("b.dcm", dicom, HU, intercept=OFFSET, photometric="MONOCHROME1"),
    ],
)
def test_low_values_are_white_where_the_file_says_so(tmp_path, name, write, stored, settings):
    write(tmp_path / name, stored, **settings)
    pillow(tmp_path / "same.png", RAW)
    window = (900, 1100)
    assert torch.equal(open_image(str(tmp_path / name), window), 255 - open_image(str(tmp_path / "same.png"), window))


EIGHT = (COLOUR // 16).astype(np.uint8)
raw = Path.write_bytes
DEEP = "more than 8 bits, which are read of grey PNG, TIFF and DICOM files; convert it"


@pytest.mark.parametrize(
    ("name", "write", "stored", "expected", "settings"),
    [
        ("a.png", pillow, EIGHT, EIGHT, {}),
        ("a.tif", pillow, EIGHT[..., 0], EIGHT[..., [0, 0, 0]], {}),
        ("a.jp2", pillow, EIGHT, EIGHT, {}),
        in_dicom("a.dcm", dicom, EIGHT, EIGHT, photometric="RGB", intercept=0),
        in_dicom("a.dcm", dicom, EIGHT[..., 0], EIGHT[..., [0, 0, 0]], intercept=0),
        in_dicom("a.dcm", dicom, EIGHT[..., 0], 255 - EIGHT[..., [0, 0, 0]], photometric="MONOCHROME1", intercept=0),
    ],
)
def test_8_bits_need_no_window_and_may_have_one(tmp_path, name, write, stored, expected, settings):
    write(tmp_path / name, stored, **settings)
    found = [open_image(str(tmp_path / name), window).permute(1, 2, 0).numpy() for window in (None, (0, 255))]
    assert np.array_equal(found[0], expected)
    assert np.array_equal(found[1], expected)


@pytest.mark.parametrize(
    ("name", "write", "stored", "reason", "settings"),
    [
        ("a.tif", tiff, COLOUR, DEEP, {}),
        ("a.png", png, COLOUR, DEEP, {}),
        ("a.png", png, COLOUR[..., [0, 1, 2, 0]], DEEP, {}),
        ("a.png", png, COLOUR[..., :2], DEEP, {}),
        ("a.ppm", pnm, COLOUR, DEEP, {"maximum": 4095}),
        ("a.pgm", pnm, RAW, DEEP, {"maximum": 4095}),
        ("a.pgm", pnm, RAW, DEEP, {"maximum": 65_535}),
        ("a.jp2", pillow, RAW, DEEP, {}),
        ("a.j2k", pillow, RAW, DEEP, {}),
        ("a.tif", tiff, RAW.astype(np.float64), "its values are of a type that Pillow does not read", {}),
        ("a.tif", pillow, np.where(RAW > 1000, np.float32(np.nan), 1), "values that are not finite numbers", {}),
        in_dicom("a.dcm", dicom, np.stack([RAW, RAW]).reshape(-1, 20), "several images", NumberOfFrames=2, Rows=24),
        in_dicom("a.dcm", dicom, EIGHT[..., 0], "those of a palette", photometric="PALETTE COLOR"),
        in_dicom("a.dcm", raw, b"no image", "DICM"),
        ("a.png", raw, b"", "it is empty", {}),
        ("a.png", raw, b"no image", "it is not an image of a known format", {}),
        # Pillow would give PostScript to Ghostscript, whatever the file is called.
        ("a.png", raw, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "known format", {}),
        ("a.png", lambda path, _: None, None, "No such file", {}),
    ],
)
def test_what_cannot_be_read_has_a_true_reason(tmp_path, name, write, stored, reason, settings):
    write(tmp_path / name, stored, **settings)
    with pytest.raises(ValueError, match=reason):
        read_pixels(str(tmp_path / name))


@pytest.mark.parametrize("window", [(5, 5), (100, 0), (float("nan"), 1), (0, float("inf"))])
def test_a_window_has_a_black_below_its_white(tmp_path, window):
    pillow(tmp_path / "a.png", RAW)
    with pytest.raises(ConfigurationError, match=r"window is .*give the value that is black, then a higher one"):
        open_image(str(tmp_path / "a.png"), window)


# What a viewer does for each EXIF orientation (the standard's table of the 0th row and column), without Pillow.
TURNED = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp", "grey.tif", "16.png", "16.tif", "float.tif"])
def test_an_image_is_turned_as_a_viewer_shows_it(tmp_path, suffix, orientation):
    exif, path = Image.Exif(), tmp_path / f"a{suffix}"
    exif[274] = orientation
    # Blocks of equal pixels, which JPEG keeps.
    blocks = np.kron(np.random.default_rng(0).choice([0, 255], (3, 2)), np.ones((16, 16))).astype(np.uint8)
    stored = blocks if suffix == "grey.tif" else np.stack([blocks] * 3, 2)
    deep = {"16": np.uint16, "fl": np.float32}.get(suffix[:2])
    Image.fromarray(stored if deep is None else blocks.astype(deep)).save(path, exif=exif, quality=95)
    found = open_image(str(path), None if deep is None else (0, 255)).numpy()
    expected = TURNED[orientation](blocks)
    assert found.shape == (3, *expected.shape)
    assert np.abs(found.astype(int) - expected).max() < 12


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage!!", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_turns_nothing(tmp_path, exif):
    Image.fromarray(EIGHT).save(tmp_path / "a.jpg", exif=exif)
    assert open_image(str(tmp_path / "a.jpg")).shape == (3, 6, 5)


def test_a_truncated_file_is_said_to_be_truncated(tmp_path):
    Image.fromarray(EIGHT).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:-2])
    with pytest.raises(ValueError, match="truncated"):
        open_image(str(tmp_path / "a.jpg"))


def pixels_of(dataset):
    return torch.stack([image for image, _ in dataset])


def test_a_folder_and_an_npz_file_have_the_same_setting(tmp_path):
    root = tree(tmp_path / "scans", pillow, ".png", train=3, test=2)
    settings = {"window": (900, 1100), "augment": False}
    folder = ImageFolder(str(root), image_size=24, in_channels=1, **settings)
    array = NpzImages(str(npz(tmp_path / "scans.npz", root)), **settings)
    assert torch.equal(pixels_of(folder.train_dataset), pixels_of(array.train_dataset))
    assert torch.equal(pixels_of(folder.test_dataset), pixels_of(array.test_dataset))
    assert pixels_of(array.train_dataset).unique().numel() > 50
    more = "it has more than 8 bits, .* Set window: .* of the data"
    with pytest.raises(DataError, match=f"scans/train/healthy/0.png: {more}"):
        ImageFolder(str(root)).prepare_data()
    with pytest.raises(DataError, match=f"scans.npz, train_images: {more}"):
        NpzImages(str(array.path)).train_dataset  # noqa: B018
    with pytest.raises(DataError, match=r"0.png cannot be read as an image \(it has more than 8 bits"):
        ImageFolder(str(root), read_first=False).train_dataset[0]


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64, np.int64])
def test_an_npz_file_may_have_any_numbers(tmp_path, dtype):
    np.savez(tmp_path / "a.npz", train_images=HU[None, :20].astype(dtype), train_labels=np.arange(1))
    tiff(tmp_path / "a.tif", HU[:20])
    found = NpzImages(str(tmp_path / "a.npz"), window=(-100, 50), augment=False)
    assert torch.equal(pixels_of(found.train_dataset)[0], open_image(str(tmp_path / "a.tif"), (-100, 50))[:1])


def test_numbers_that_are_none_are_refused_in_an_npz_file(tmp_path):
    np.savez(tmp_path / "a.npz", train_images=np.full((2, 4, 4), np.nan), train_labels=np.arange(2))
    with pytest.raises(DataError, match=r"a.npz, train_images has values that are not finite"):
        NpzImages(str(tmp_path / "a.npz"), window=(0, 1)).train_dataset  # noqa: B018


def test_dicom_without_pydicom_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("dp_lightning.datamodules.decoding.find_spec", lambda name: None)
    root = tree(tmp_path / "scans", lambda path, _: path.write_bytes(b"DICM"), ".dcm", train=2, test=2)
    needs = re.escape("0.dcm: it is a DICOM file, which needs pydicom: pip install 'dp-lightning[dicom]'.")
    with pytest.raises(DataError, match=needs):
        ImageFolder(str(root)).prepare_data()
    settings = {"image_size": 8, "num_classes": 2, "in_channels": 1, "mean": (0.5,), "std": (0.5,)}
    files = ImageFiles(str(root), **settings)
    files.setup()
    _, problems = next(iter(files.predict_dataloader()))
    assert "dp-lightning[dicom]" in problems[0]


@pytest.mark.parametrize("kind", ["folder", "npz"])
@pytest.mark.parametrize(
    ("window", "few"), [((0, 4095), True), ((-160, 240), None), ((3000, 4000), None), ((864, 1264), False)], ids=str
)
def test_a_window_that_hides_the_images_is_named(tmp_path, kind, window, few):
    root = tree(tmp_path / "ct", pillow, ".png", train=4, test=2)
    if kind == "folder":
        data = ImageFolder(str(root), image_size=24, window=window)
    else:
        data = NpzImages(str(npz(tmp_path / "ct.npz", root)), window=window)
    refused = pytest.raises(DataError, match="have one of 256 levels") if few is None else nullcontext()
    with warnings.catch_warnings(record=True) as found, refused:
        warnings.simplefilter("always")
        data.prepare_data()
        data.setup("fit")
        data.train_dataset[0]
    named = [str(each.message) for each in found if "little can be told apart" in str(each.message)]
    assert bool(named) == bool(few)
