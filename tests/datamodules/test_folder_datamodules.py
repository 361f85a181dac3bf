"""Images in folders: ImageFolder, ImageNet and Tiny ImageNet on small trees."""

import contextlib
import io
import re
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image, ImageFile
from torchvision.transforms import v2

from dp_lightning.cli import main
from dp_lightning.commands import training
from dp_lightning.datamodules import ImageFiles, ImageFolder, ImageNet, TinyImageNet, file_source, folder
from dp_lightning.datamodules.file_source import FileNames, open_rgb
from dp_lightning.errors import ConfigurationError, DataError


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def write_image(path, size=(12, 12), mode="RGB", level=100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0]), level, dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_tree(root, splits=("train", "val"), classes=("cat", "dog"), num=3) -> str:
    for split in splits:
        for name in classes:
            for index in range(num):
                write_image(root / split / name / f"{index}.png")
    return str(root)


def test_counts_come_from_file_names(tmp_path, monkeypatch):
    root = write_tree(tmp_path, classes=("cat", "dog", "newt"), num=4)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / "._0.png").write_text("a hidden file")
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("opened an image"))
    data = ImageFolder(root, val_fraction=0.25)
    data.check_files()
    assert (data.num_train, data.num_val, data.num_classes) == (9, 3, 3)
    assert (data.in_channels, data.image_size) == (3, 64)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("train",), []),
        (("train", "val"), ["test"]),
        (("train", "test"), ["test"]),
        (("train", "val", "test"), ["val", "test"]),
    ],
)
def test_the_evaluation_sets_are_looked_up(tmp_path, folders, names):
    data = ImageFolder(write_tree(tmp_path, splits=folders))
    assert list(data.val_dataloader()) == names


def test_a_single_val_folder_is_the_test_set(tmp_path):
    data = ImageFolder(write_tree(tmp_path, splits=("train", "val")))
    data.setup("test")
    assert all("/val/" in path for path in data.test_dataset.source.paths)


def test_images_of_any_size_and_kind_become_rgb_squares(tmp_path):
    root = write_tree(tmp_path)
    write_image(tmp_path / "val" / "cat" / "gray.png", size=(30, 20), mode="L")
    write_image(tmp_path / "val" / "cat" / "palette.gif.png", size=(5, 9), mode="P")
    write_image(tmp_path / "val" / "dog" / "alpha.png", size=(64, 40), mode="RGBA")
    write_image(tmp_path / "val" / "dog" / "print.jpg", size=(64, 40), mode="CMYK")
    for augment in (True, False):
        data = ImageFolder(root, image_size=16, augment=augment)
        (batch,) = data.test_dataloader()
        assert batch[0].shape == (10, 3, 16, 16)
        assert sorted(batch[1].tolist()) == [0] * 5 + [1] * 5
        (batch,) = data.train_dataloader()
        assert batch[0].shape == (6, 3, 16, 16)


@pytest.mark.parametrize("kind", [ImageFolder, ImageNet])
def test_images_become_grey_when_told_and_grey_ones_keep_their_pixels(tmp_path, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    write_tree(tmp_path, classes=("cat",), num=1)
    Image.fromarray(pixels[0]).save(tmp_path / "val" / "cat" / "0.png")
    Image.fromarray(pixels[1, :, :, 0]).save(tmp_path / "val" / "cat" / "1.png")
    data = kind(str(tmp_path), image_size=14, in_channels=1, mean=(0.5,), std=(0.25,), augment=False)
    data.setup()
    assert data.in_channels == 1
    resized = v2.Resize(data.resized_to)(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    red, green, blue = v2.CenterCrop(14)(resized)[0].double()
    colour, grey = (image for image, _ in data.test_dataset)
    expected = (0.299 * red + 0.587 * green + 0.114 * blue)[None] / 255
    torch.testing.assert_close(colour.double(), (expected - 0.5) / 0.25, rtol=0, atol=4.1 / 255 / 2)
    same = v2.CenterCrop(14)(resized)[1, :1].float() / 255
    torch.testing.assert_close(grey, (same - 0.5) / 0.25)
    views = kind(str(tmp_path), image_size=14, in_channels=1, mean=(0.5,), std=(0.25,)).train_dataset
    assert views[0][0].shape == (1, 14, 14)


def test_another_number_of_channels_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="in_channels is 2; files give 1 or 3"):
        ImageFolder(str(tmp_path), in_channels=2)


def test_pixels_and_labels_survive(tmp_path):
    write_image(tmp_path / "train" / "a" / "0.png", level=0)
    write_image(tmp_path / "train" / "b" / "0.png", level=255)
    data = ImageFolder(str(tmp_path), image_size=12, augment=False)
    pairs = [(image.unique().tolist(), label) for image, label in data.train_dataset]
    assert pairs == [([-1.0], 0), ([1.0], 1)]


def test_a_truncated_image_is_named_when_it_is_read(tmp_path):
    root = write_tree(tmp_path)
    broken = tmp_path / "val" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    data = ImageFolder(root)
    data.setup("fit")
    with pytest.raises(DataError, match=r"val/dog/1.png cannot be read as an image") as caught:
        list(data.test_dataloader())
    assert str(broken) in str(caught.value)


def test_a_truncated_image_is_named_from_a_worker_process_too(tmp_path, monkeypatch, capsys):
    root = write_tree(tmp_path)
    (tmp_path / "val" / "dog" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"val/dog/1.png cannot be read as an image") as caught:
        list(ImageFolder(root, num_workers=1).test_dataloader())

    def read_images(arguments):
        raise caught.value

    monkeypatch.setattr(training, "main", read_images)
    with pytest.raises(SystemExit, match="2"):
        main(["test"])
    said = capsys.readouterr().err.strip()  # without the traceback that the process has added
    assert re.fullmatch(r"dpl test: error: \S+val/dog/1.png cannot be read as an image .*", said)


def test_an_empty_class_folder_is_named(tmp_path):
    root = write_tree(tmp_path)
    (tmp_path / "train" / "eel").mkdir()
    (tmp_path / "val" / "eel").mkdir()
    with pytest.raises(DataError, match=r"train/eel holds no image files"):
        ImageFolder(root).check_files()


@pytest.mark.parametrize(
    ("count", "told"),
    [(2, "train/e0, .*train/e1 hold no image files"), (5, "train/e0, .*train/e1, .*train/e2 and 2 more hold no image")],
)
def test_several_empty_class_folders_are_named(tmp_path, count, told):
    root = write_tree(tmp_path)
    for place in range(count):
        (tmp_path / "train" / f"e{place}").mkdir()
    with pytest.raises(DataError, match=told):
        ImageFolder(root).check_files()


def test_class_folders_that_differ_are_named(tmp_path):
    root = write_tree(tmp_path)
    write_image(tmp_path / "val" / "eel" / "0.png")
    with pytest.raises(DataError, match=r"val has class folders that .*train does not have: eel"):
        ImageFolder(root).check_files()


def test_an_evaluation_set_may_lack_classes(tmp_path):
    root = write_tree(tmp_path, classes=("ant", "cat", "dog"))
    shutil.rmtree(tmp_path / "val" / "ant")
    for path in (tmp_path / "val" / "cat").iterdir():
        path.unlink()
    data = ImageFolder(root)
    data.setup("test")
    assert (data.num_classes, data.test_dataset.labels.tolist()) == (3, [2, 2, 2])
    for path in (tmp_path / "val" / "dog").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="val holds no image files"):
        ImageFolder(root).check_files()


def test_what_is_no_image_by_its_name_is_said(tmp_path):
    root = write_tree(tmp_path)
    dog = tmp_path / "train" / "dog"
    for name in ("a.dcm", "b.DCM", "c", ".hidden"):
        (dog / name).touch()
    (dog / "more.png").mkdir()
    (dog / "gone.png").symlink_to(tmp_path / "nowhere")
    (dog / "other.png").symlink_to(dog / "0.png")
    (dog / "loop.png").symlink_to(dog / "loop.png")
    data = ImageFolder(root)
    with pytest.warns(
        UserWarning, match=r"not read as images: 2 x \.dcm, 2 x broken link, 1 x folder, 1 x no extension"
    ):
        data.check_files()
    assert data.num_train == 7
    with pytest.warns(UserWarning, match=r"2 x \.dcm, 1 x no extension"):
        files(tmp_path).setup("predict")


def files(root, **kwargs):
    return ImageFiles(str(root), image_size=8, num_classes=2, in_channels=3, mean=(0.5,), std=(0.5,), **kwargs)


def spoiled(tmp_path):
    """A tree with 12 truncated files among 24 training images."""
    root = write_tree(tmp_path, num=12)
    for name in ("cat", "dog"):
        for index in range(6):
            path = tmp_path / "train" / name / f"{index}.png"
            path.write_bytes(path.read_bytes()[:40])
    return root


def test_all_files_that_cannot_be_read_are_named_before_a_run(tmp_path):
    named = r"(\n.*cat.[0-5]\.png: .*){6}(\n.*dog.*){4}\n  and 2 more"
    with pytest.raises(DataError, match=r"12 of 24 files in .*train cannot be read.*" + named):
        ImageFolder(spoiled(tmp_path)).prepare_data()


@pytest.mark.parametrize(
    ("read_first", "below", "reads"), [(None, 48, False), (None, 49, True), (True, 1, True), (False, 99, False)]
)
def test_a_number_of_files_decides_whether_they_are_read_first_unless_the_setting_does(
    tmp_path, monkeypatch, read_first, below, reads
):
    monkeypatch.setattr(folder, "READ_FIRST_BELOW", below)  # the tree has 48 files
    data = ImageFolder(spoiled(tmp_path), read_first=read_first)
    with pytest.raises(DataError) if reads else contextlib.nullcontext():
        data.prepare_data()


def test_a_command_that_does_not_train_reads_no_training_image_first(tmp_path):
    data = ImageFolder(spoiled(tmp_path))
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING))
    data.prepare_data()
    (tmp_path / "val" / "cat" / "3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 of 24 files in .*val cannot be read.*\n.*3\.png: it is empty"):
        data.prepare_data()


def test_a_missing_root_says_what_to_set(tmp_path):
    data = ImageFolder(str(tmp_path / "nowhere"))
    for access in (lambda: data.num_train, lambda: data.num_classes, data.check_files, data.setup):
        with pytest.raises(DataError, match=r"nowhere does not exist; set data.init_args.root"):
            access()


def test_a_root_without_train_says_what_to_set(tmp_path):
    with pytest.raises(DataError, match=r"train is missing; set data.init_args.root"):
        ImageFolder(str(tmp_path)).check_files()


@pytest.mark.parametrize("name", ["photos", "photos/train"])
def test_a_link_without_a_target_is_told_as_such(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/nowhere/else")
    with pytest.raises(DataError, match=rf"{name} is a symbolic link to /nowhere/else, which does not exist; correct"):
        ImageFolder(str(tmp_path / "photos")).check_files()


def test_a_train_folder_without_classes_is_named(tmp_path):
    write_image(tmp_path / "train" / "0.png")
    with pytest.raises(DataError, match="train has no class folders"):
        ImageFolder(str(tmp_path)).check_files()


def test_an_impossible_size_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="image_size must be a whole number of at least 1"):
        ImageFolder(str(tmp_path), image_size=0)


def test_imagenet_uses_val_as_the_test_set_and_ignores_the_unlabelled_test_folder(tmp_path):
    root = write_tree(tmp_path)
    write_image(tmp_path / "test" / "ILSVRC2012_test_1.JPEG")
    data = ImageNet(root, num_workers=0)
    data.setup()
    assert (data.num_train, data.num_classes, data.image_size) == (6, 2, 224)
    assert list(data.val_dataloader()) == ["test"]
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (6, 3, 224, 224)
    (images, _), *_ = data.test_dataloader()
    assert images.shape == (6, 3, 224, 224)


def test_imagenet_transforms_are_the_usual_ones(tmp_path):
    data = ImageNet(str(tmp_path))
    resize, centre = data.image_transform().transforms
    assert (resize.size, centre.size) == ([256], (224, 224))
    ours, theirs = data.random_transform(), v2.RandomResizedCrop(224)
    decoded = torch.randint(0, 256, (300, 310, 3), dtype=torch.uint8).permute(2, 0, 1)
    for seed in range(20):
        crops = []
        for crop in (ours, theirs):
            torch.manual_seed(seed)
            crops.append(crop(decoded))
        assert torch.equal(*crops)
    assert (data.augmentation().padding, data.augmentation().flip) == (0, True)


@pytest.mark.parametrize("kind", [ImageFolder, ImageNet])
def test_a_file_is_decoded_once_for_all_views_of_its_image(tmp_path, monkeypatch, kind):
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = noise.integers(0, 256, (48, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    opened = []
    monkeypatch.setattr(file_source, "open_rgb", lambda path: opened.append(path) or open_rgb(path))
    train = kind(str(tmp_path), image_size=32).train_dataset
    images, labels = zip(*train.__getitems__([0, 0, 0, 0, 3, 3, 3, 3, 1]), strict=True)
    assert [Path(path).name for path in opened] == ["0.png", "1.png", "1.png"]
    assert labels == (0, 0, 0, 0, 1, 1, 1, 1, 0)
    # Every view is a draw of its own: with crops of 9 x 9 places, or of any size, few are equal.
    assert len({tuple(image.flatten().tolist()) for image in images}) >= 7
    plain = kind(str(tmp_path), image_size=32, augment=False).train_dataset
    images, _ = zip(*plain.__getitems__([2, 2, 0]), strict=True)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_imagenet_without_val_is_named(tmp_path):
    with pytest.raises(DataError, match=r"val is missing; set data.init_args.root"):
        ImageNet(write_tree(tmp_path, splits=("train",))).check_files()


def write_tiny(root, wnids=("n02", "n01"), num=3) -> str:
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    annotations = []
    for label, wnid in enumerate(wnids):
        for index in range(num):
            write_image(root / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", size=(64, 64), mode="L")
        write_image(root / "val" / "images" / f"val_{label}.JPEG", size=(64, 64))
        annotations.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(reversed(annotations)))
    return str(root)


def test_tiny_imagenet_reads_its_own_layout(tmp_path):
    data = TinyImageNet(write_tiny(tmp_path), val_fraction=1 / 3)
    data.setup()
    assert (data.num_train, data.num_val, data.num_classes) == (4, 2, 2)
    assert (data.in_channels, data.image_size) == (3, 64)
    # Labels follow wnids.txt, which is not in alphabetical order.
    (images, labels), *_ = data.test_dataloader()
    assert images.shape == (2, 3, 64, 64)
    names = [path.rsplit("/", 1)[1] for path in data.test_dataset.source.paths]
    assert dict(zip(names, labels.tolist(), strict=True)) == {"val_0.JPEG": 0, "val_1.JPEG": 1}
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (4, 3, 64, 64)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "wnids.txt").unlink(), r"wnids.txt is missing; unpack tiny-imagenet-200.zip"),
        (lambda root: (root / "wnids.txt").write_text("\n"), "wnids.txt lists no classes"),
        (lambda root: (root / "wnids.txt").write_text("n02\nn01\nn03\n"), "train/n03/images is missing"),
        (lambda root: (root / "train/n01").rename(root / "train/n09"), "train/n01/images is missing"),
        (lambda root: (root / "val/val_annotations.txt").unlink(), "val_annotations.txt is missing"),
        (lambda root: (root / "val/images").rename(root / "val/pictures"), "val/images is missing"),
        (lambda root: (root / "val/images/val_1.JPEG").unlink(), "val/images/val_1.JPEG is missing"),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn77\n"),
            "line 1: 'n77' is not in wnids.txt",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG"),
            "line 1: '' is not in wnids.txt",
        ),
    ],
)
def test_a_damaged_tiny_imagenet_is_named_before_training(tmp_path, spoil, message):
    root = write_tiny(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        TinyImageNet(root).check_files()


def test_an_image_of_another_size_is_named(tmp_path):
    root = write_tiny(tmp_path)
    write_image(tmp_path / "val" / "images" / "val_0.JPEG", size=(32, 64))
    with pytest.raises(DataError, match=r"val_0\.JPEG.*32 x 64.*64 x 64"):
        list(TinyImageNet(root).test_dataloader())


@pytest.mark.parametrize(("extension", "kind"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2")])
def test_sixteen_bits_become_eight(tmp_path, extension, kind):
    wide = np.linspace(0, 65_535, 256 * 16).reshape(64, 64).astype(kind)
    path = tmp_path / f"wide.{extension}"
    Image.frombytes("I;16B" if kind == ">u2" else "I;16", (64, 64), wide.tobytes()).save(path)
    found = open_rgb(str(path))
    assert torch.equal(found[0], torch.from_numpy(np.round(wide / 257).astype(np.uint8)))
    assert torch.equal(found[0], found[2])
    assert found.unique().numel() == 256


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_thirty_two_bits_are_refused(tmp_path, kind):
    Image.fromarray(np.ones((8, 8), kind)).save(tmp_path / "scan.tif")
    with pytest.raises(DataError, match=r"scan.tif cannot be read as an image \(it has 32 bits per pixel.*convert it"):
        open_rgb(str(tmp_path / "scan.tif"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_are_decoded_as_pil_does(tmp_path, mode):
    y, x = np.mgrid[0:40, 0:56]
    pixels = np.stack([128 + 100 * np.sin(x / 9), 128 + 100 * np.cos(y / 7), 2 * x + y], axis=2).clip(0, 255)
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(tmp_path / "a.jpg", quality=95)
    ours = open_rgb(str(tmp_path / "a.jpg"))
    with Image.open(tmp_path / "a.jpg") as image:
        pil = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    assert ours.shape == (3, 40, 56)
    assert ours.dtype == torch.uint8
    assert int((ours.int() - pil.int()).abs().max()) <= (2 if mode != "CMYK" else 12)


@pytest.mark.parametrize("keep", [200, -2])
def test_a_jpeg_without_its_end_is_named(tmp_path, keep):
    write_image(tmp_path / "a.jpg", size=(64, 64))
    path = tmp_path / "a.jpg"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a.jpg cannot be read as an image"):
        open_rgb(str(path))


def test_names_of_files_are_kept_in_one_block():
    paths = ["a/b.png", "", "ü/ß.jpg", "x" * 300]
    names = FileNames(iter(paths))
    assert list(names) == paths
    assert len(names) == 4
    with pytest.raises(IndexError):
        names[4]
    assert len(FileNames([])) == 0
    # The bytes of the names and eight more for each.
    many = FileNames(f"train/n{k % 1000:08d}/n{k:08d}.JPEG" for k in range(10_000))
    assert many._text.nbytes + many._ends.nbytes < 10_000 * (36 + 8) + 100


def claims(suffix, width, height):
    """A small image file whose header says that it is a large one."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "ppm": "PPM"}[suffix])
    content = file.getvalue()
    if suffix == "png":
        head = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
        return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]
    if suffix == "jpg":
        place = content.index(b"\xff\xc0") + 5
        return content[:place] + struct.pack(">HH", height, width) + content[place + 4 :]
    if suffix == "bmp":
        return content[:18] + struct.pack("<ii", width, height) + content[26:]
    return content.replace(b"8 8", f"{width} {height}".encode(), 1)


@pytest.mark.parametrize(
    ("suffix", "side"), [("png", 9_000), ("png", 10**6), ("jpg", 65_000), ("bmp", 9_000), ("ppm", 9_000)]
)
def test_an_image_is_decoded_only_where_its_header_claims_a_size_that_is_read(tmp_path, suffix, side, monkeypatch):
    path = tmp_path / f"large.{suffix}"
    path.write_bytes(claims(suffix, side, side))
    for decode in (Image.Image, ImageFile.ImageFile):
        monkeypatch.setattr(decode, "load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr(file_source, "decode_jpeg", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(DataError, match=rf"large.{suffix} cannot be read as an image.*(pixels|decompression bomb)"):
        open_rgb(str(path))


def test_an_image_file_starts_no_program(tmp_path):
    """PIL would give PostScript to Ghostscript, whatever the file is called."""
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(DataError, match=r"x.png cannot be read as an image \(it is not an image of a known"):
        open_rgb(str(path))


def test_a_list_of_classes_that_is_no_text_is_named(tmp_path):
    root = write_tiny(tmp_path)
    (tmp_path / "wnids.txt").write_bytes(b"\xff\xfe\xe9")
    with pytest.raises(DataError, match=r"wnids.txt is not UTF-8 text"):
        _ = TinyImageNet(root).num_classes
