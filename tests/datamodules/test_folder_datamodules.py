"""Images in folders: ImageFolder, ImageNet and Tiny ImageNet on small trees."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dp_lightning.datamodules import ImageFiles, ImageFolder, ImageNet, TinyImageNet, file_source, folder
from dp_lightning.datamodules.listing import image_files
from dp_lightning.errors import DataError


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
    assert (data.num_train, data.num_classes) == (9, 3)
    assert (data.in_channels, data.image_size) == (3, 64)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("train",), []),
        (("train", "val"), ["test"]),
        (("train", "test"), ["test"]),
        (("train", "val", "test"), ["val", "test"]),
        (("train", "valid"), ["test"]),
        (("Training", "VALIDATION", "Testing"), ["val", "test"]),
        (("TRAIN", "dev", "test"), ["val", "test"]),
        (("train", "Val", "test", ".cache"), ["val", "test"]),
    ],
)
def test_splits_have_several_names_in_any_case(tmp_path, folders, names, recwarn):
    data = ImageFolder(write_tree(tmp_path, splits=folders))
    assert (list(data.val_dataloader()), data.num_train) == (names, 6)
    assert not [each for each in recwarn if "not read" in str(each.message)]


@pytest.mark.parametrize("folders", [("train", "holdout"), ("train", "test", "masks"), ("train", "val", "valid")])
def test_a_folder_of_images_that_is_passed_over_is_named(tmp_path, folders):
    with pytest.warns(UserWarning, match=rf"in {tmp_path / folders[-1]} are not read\. .*called one of train"):
        ImageFolder(write_tree(tmp_path, splits=folders), val_fraction=0.0).setup()


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
    assert data.in_channels == 1
    resized = v2.CenterCrop(14)(v2.Resize(data.resized_to)(torch.from_numpy(pixels).permute(0, 3, 1, 2)))
    red, green, blue = resized[0].double()
    colour, grey = (image for image, _ in data.test_dataset)
    expected = (0.299 * red + 0.587 * green + 0.114 * blue)[None]
    torch.testing.assert_close(colour.double(), expected, rtol=0, atol=0.51)  # rounded to a byte
    assert torch.equal(grey, resized[1, :1])
    views = kind(str(tmp_path), image_size=14, in_channels=1, mean=(0.5,), std=(0.25,)).train_dataset
    assert views[0][0].shape == (1, 14, 14)


def test_a_truncated_image_is_named_when_a_worker_reads_it(tmp_path):
    root = write_tree(tmp_path)
    broken = tmp_path / "val" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=rf"{broken} cannot be read as an image"):
        list(ImageFolder(root, num_workers=1).test_dataloader())


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
    with pytest.raises(DataError, match=r"no image files are in .*val/ant"):
        ImageFolder(root).setup()


def test_files_that_are_not_images_by_their_names_are_counted(tmp_path):
    root = write_tree(tmp_path)
    dog = tmp_path / "train" / "dog"
    for name in ("a.heic", "b.HEIC", "c", ".hidden"):
        (dog / name).touch()
    (dog / "other.png").symlink_to(dog / "0.png")
    with pytest.warns(UserWarning, match=r"train are not read as images: 2 x \.heic, 1 x no extension"):
        assert ImageFolder(root).num_train == 7
    data = files(tmp_path)
    data.setup("predict")
    assert [Path(file).name for file in data.skipped] == ["a.heic", "b.HEIC", "c"]


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["a.nii", "b.NII"], r"2 x \.nii"),
        (["a.heic", "b.txt"], r"1 x \.heic, 1 x \.txt"),
        (["scan"], "1 x no extension"),
        ([], "holds no files"),
    ],
)
def test_a_folder_without_images_says_what_it_holds(tmp_path, names, kinds):
    write_tree(tmp_path, splits=("test",))
    (tmp_path / "train" / "cat").mkdir(parents=True)
    for name in names:
        (tmp_path / "train" / "cat" / name).touch()
    with pytest.raises(DataError, match=rf"The training set is empty: no image files are in .*train/cat; .*{kinds}"):
        ImageFolder(str(tmp_path)).setup()
    with pytest.raises(DataError, match=rf"There are no image files; .*{kinds}"):
        files(tmp_path / "train").setup("predict")


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


@pytest.mark.parametrize(
    ("read_first", "below", "reads"), [(None, 48, False), (None, 49, True), (True, 1, True), (False, 99, False)]
)
def test_all_files_that_cannot_be_read_are_named_before_a_run_if_they_are_few_or_the_setting_says_so(
    tmp_path, monkeypatch, read_first, below, reads
):
    monkeypatch.setattr(folder, "READ_FIRST_BELOW", below)  # the tree has 48 files
    data = ImageFolder(spoiled(tmp_path), read_first=read_first)
    named = r"(\n.*cat.[0-5]\.png: .*){6}(\n.*dog.*){4}\n  and 2 more"
    message = r"12 of 24 files in .*train cannot be read.*" + named
    with pytest.raises(DataError, match=message) if reads else contextlib.nullcontext():
        data.prepare_data()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "train"), r"train is missing; set data.init_args.root"),
        (lambda root: [shutil.rmtree(path) for path in (root / "train").iterdir()], "train has no class folders"),
        (lambda root: (root / "train" / "eel").mkdir(), r"no image files are in .*train/eel; remove the folder"),
        (lambda root: write_image(root / "val" / "eel" / "0.png"), "val have classes that no training image has: eel"),
        (lambda root: write_image(root / "val" / "0.png"), r"val/0.png is not .*/val/<class>/<image>\. Move or remove"),
    ],
)
def test_a_tree_with_a_fault_is_named_before_a_run(tmp_path, spoil, message):
    root = write_tree(tmp_path / "photos")
    spoil(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        ImageFolder(root).setup()


def test_imagenet_uses_val_as_the_test_set_and_ignores_the_unlabelled_test_folder(tmp_path):
    root = write_tree(tmp_path)
    write_image(tmp_path / "test" / "ILSVRC2012_test_1.JPEG")
    data = ImageNet(root, num_workers=0)
    data.setup()
    assert (data.num_train, data.num_classes, data.image_size, data.resized_to) == (6, 2, 224, 256)
    assert list(data.val_dataloader()) == ["test"]
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (6, 3, 224, 224)
    (images, _), *_ = data.test_dataloader()
    assert images.shape == (6, 3, 224, 224)


@pytest.mark.parametrize("kind", [ImageFolder, ImageNet])
def test_a_file_is_decoded_once_for_all_views_of_its_image(tmp_path, monkeypatch, kind):
    noise = np.random.default_rng(0)
    for file in map(Path, image_files(write_tree(tmp_path, classes=("a", "b"), num=2))):
        Image.fromarray(noise.integers(0, 256, (48, 40, 3), dtype=np.uint8)).save(file)
    opened, decoded = [], file_source.open_image
    monkeypatch.setattr(file_source, "open_image", lambda path, window: opened.append(path) or decoded(path))
    train = kind(str(tmp_path), image_size=32).train_dataset
    images, labels = zip(*(train[place] for place in [0, 0, 0, 0, 3, 3, 3, 3, 1]), strict=True)
    assert [Path(path).name for path in opened] == ["0.png", "1.png", "1.png"]
    assert labels == (0, 0, 0, 0, 1, 1, 1, 1, 0)
    # Every view is a draw of its own: with crops of 9 x 9 places, or of any size, few are equal.
    assert len({tuple(image.flatten().tolist()) for image in images}) >= 7
    plain = kind(str(tmp_path), image_size=32, augment=False).train_dataset
    images = [plain[place][0] for place in (2, 2, 0)]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


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
    assert (data.num_train, data.num_classes) == (4, 2)
    assert (data.in_channels, data.image_size) == (3, 64)
    # Labels follow wnids.txt, which is not in alphabetical order.
    (images, labels), *_ = data.test_dataloader()
    assert images.shape == (2, 3, 64, 64)
    names = [path.rsplit("/", 1)[1] for path in data.test_dataset.source.paths]
    assert dict(zip(names, labels.tolist(), strict=True)) == {"val_0.JPEG": 0, "val_1.JPEG": 1}
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (4, 3, 64, 64)
