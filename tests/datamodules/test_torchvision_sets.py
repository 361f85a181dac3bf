"""The data sets of torchvision on small files in its format.

torchvision compares each file with the checksum of the published one; the small files cannot have it, so the
comparison is replaced by a look for the file.
"""

import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets.cifar
import torchvision.datasets.svhn

from dp_lightning.datamodules import CIFAR10, CIFAR100, SVHN
from dp_lightning.errors import DataError

RNG = np.random.default_rng(0)
# As published: training images, classes, channels, pixels on a side.
SIZES = {
    CIFAR10: (50_000, 10, 3, 32),
    CIFAR100: (50_000, 100, 3, 32),
    SVHN: (73_257, 10, 3, 32),
}
DATASETS = tuple(SIZES)
# Modules of torchvision that compare checksums and download.
MODULES = (
    torchvision.datasets.cifar,
    torchvision.datasets.svhn,
)


def write_cifar10(root: Path, labels: list[int]) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]
    for name in names:
        data = RNG.integers(0, 255, (len(labels), 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def write_cifar100(root: Path, labels: list[int]) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, copies in (("train", 5), ("test", 1)):
        data = RNG.integers(0, 255, (copies * len(labels), 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "fine_labels": labels * copies}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


def write_svhn(root: Path, labels: list[int]) -> None:
    for name, copies in (("train", 5), ("test", 1)):
        images = RNG.integers(0, 255, (32, 32, 3, copies * len(labels)), dtype=np.uint8)
        # The files say 10 for the digit 0.
        digits = np.array([label or 10 for label in labels * copies], dtype=np.uint8).reshape(-1, 1)
        scipy.io.savemat(root / f"{name}_32x32.mat", {"X": images, "y": digits})


WRITERS = {
    CIFAR10: write_cifar10,
    CIFAR100: write_cifar100,
    SVHN: write_svhn,
}


@pytest.fixture
def small_files(tmp_path, monkeypatch):
    """A function that writes the files of a data set with four test images and twenty training images."""
    for module in MODULES:
        monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: Path(path).is_file())

    def write(kind, labels=(0, 3, 9, 1)) -> str:
        WRITERS[kind](tmp_path, list(labels))
        monkeypatch.setattr(kind, "num_available", 20)
        return str(tmp_path)

    return write


@pytest.mark.parametrize("kind", DATASETS)
def test_sizes_are_known_without_files(tmp_path, kind):
    data, num_train = kind(str(tmp_path)), SIZES[kind][0]
    assert (data.num_train, data.num_classes, data.in_channels, data.image_size) == SIZES[kind]
    assert kind(str(tmp_path), val_fraction=0.1).num_train == num_train - round(0.1 * num_train)
    # One published constant for each channel.
    assert len(data.mean) == len(data.std) == SIZES[kind][2]


@pytest.mark.parametrize("kind", DATASETS)
def test_files_are_read_into_both_sets(small_files, kind):
    data = kind(small_files(kind), val_fraction=0.25)
    data.prepare_data()
    data.setup()
    assert (len(data.train_dataset), len(data.val_dataset), len(data.test_dataset)) == (15, 5, 4)
    assert data.num_train == 15
    (images, labels), *_ = data.test_dataloader()
    assert images.shape == (4, kind.in_channels, kind.image_size, kind.image_size)
    assert labels.tolist() == [0, 3, 9, 1]


def test_pixels_are_in_the_right_place(small_files):
    root = small_files(CIFAR10)
    with open(Path(root) / "cifar-10-batches-py" / "test_batch", "rb") as file:
        raw = pickle.load(file)["data"]
    data = CIFAR10(root)
    image, _ = data.test_dataset[2]
    assert torch.equal(image, torch.from_numpy(raw[2].reshape(3, 32, 32)))


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("fault", ["missing", "another checksum"])
def test_files_that_are_not_the_published_ones_say_what_to_set(small_files, monkeypatch, kind, fault):
    root = small_files(kind)
    monkeypatch.undo()
    data = kind(root if fault == "another checksum" else f"{root}/nowhere")
    with pytest.raises(DataError, match=r"does not give the images .*not found or corrupted.* data.init_args.download"):
        data.prepare_data()


def test_a_failed_download_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", refuse)
    with pytest.raises(DataError, match=r"does not give the images of .* \(no route to host\)"):
        CIFAR10(str(tmp_path), download=True).prepare_data()


def test_svhn_images_are_never_mirrored():
    steps = {kind: [type(step).__name__ for step in kind().train_transform().transforms] for kind in (SVHN, CIFAR10)}
    assert steps == {SVHN: ["RandomCrop"], CIFAR10: ["RandomCrop", "RandomHorizontalFlip"]}
