"""Features of a frozen network: computed once, right, and never those of other images."""

import fcntl
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image

from dp_lightning.datamodules import CachedFeatures, Digits, ImageFolder, NpzImages, features
from dp_lightning.datamodules.file_source import FileSource
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.models.scattering import ScatteringFeatures

BACKBONE = "test_efficientnet_gn"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "network.pth"
    torch.save(timm.create_model(BACKBONE, num_classes=3).state_dict(), path)
    return str(path)


def arrays(folder, n=40):
    noise = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        train_images=noise.integers(0, 255, (n, 12, 12, 3), np.uint8),
        train_labels=np.arange(n) % 4,
        test_images=noise.integers(0, 255, (10, 12, 12, 3), np.uint8),
        test_labels=np.arange(10) % 4,
    )
    return NpzImages(str(folder / "images.npz"), val_fraction=0.25, mean=(0.4,), std=(0.3,))


def ready(images, folder, weights, **kwargs):
    data = CachedFeatures(images, BACKBONE, weights=weights, cache=str(folder / "cache"), input_size=32, **kwargs)
    data.prepare_data()
    data.setup("fit")
    return data


def test_features_are_the_networks_of_the_images_as_it_knows_them(tmp_path, weights):
    images = arrays(tmp_path)
    data = ready(images, tmp_path, weights, batch_size=7)
    assert (data.num_classes, data.num_train, data.in_channels) == (4, 30, 256)
    network = timm.create_model(BACKBONE, num_classes=0).eval()
    network.load_state_dict({k: v for k, v in torch.load(weights, weights_only=True).items() if "classifier" not in k})
    for name, wanted in (("train", images.train_dataset), ("val", images.val_dataset), ("test", images.test_dataset)):
        pixels = torch.stack([image for image, _ in wanted]).float() / 255
        resized = torch.nn.functional.interpolate(pixels, (32, 32), mode="bicubic", antialias=True)
        own = timm.data.resolve_model_data_config(network)
        mean, std = (torch.tensor(own[key]).view(3, 1, 1) for key in ("mean", "std"))
        with torch.no_grad():
            expected = network((resized - mean) / std)
        found = data._sets[name]
        torch.testing.assert_close(found.tensors[0], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.tensors[1], wanted.labels)
    batch = next(iter(data.test_dataloader()))
    assert batch[0].shape == (10, 256)
    assert list(data.val_dataloader()) == ["val", "test"]


def test_files_that_are_there_are_not_computed_again(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(features, "_PIECE", 25)  # of 30 training images, and 10 each for validation and test
    first = ready(arrays(tmp_path), tmp_path, weights, batch_size=7)
    files = sorted(first.folder.glob("*.safetensors"))
    assert [file.name.split("-")[0] for file in files] == ["test", "train", "train", "val"]
    files[-1].unlink()  # as after an interruption
    written = {file: file.stat().st_mtime_ns for file in files[:-1]}
    again = ready(arrays(tmp_path), tmp_path, weights)
    assert {file: file.stat().st_mtime_ns for file in files[:-1]} == written
    assert files[-1].exists()
    assert again.folder == first.folder
    for split in ("train", "val"):
        torch.testing.assert_close(again._sets[split].tensors, first._sets[split].tensors)


def test_two_runs_write_one_cache_one_after_the_other(tmp_path, weights, monkeypatch):
    data = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path), input_size=32)
    data.folder.mkdir(mode=0o700)
    asked, flock = threading.Event(), fcntl.flock
    with (data.folder / "lock").open("w") as other, ThreadPoolExecutor(1) as thread:
        flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", lambda *given: asked.set() or flock(*given))
        waiting = thread.submit(data.prepare_data)
        # The thread ends only when it has the lock, so nothing is asserted before.
        has_asked, written = asked.wait(60), list(data.folder.glob("*.safetensors"))
        other.close()
        waiting.result(60)
    assert has_asked
    assert not written
    assert len(list(data.folder.glob("*.safetensors"))) == 3


def test_a_cache_that_cannot_be_written_is_named(tmp_path, weights):
    (tmp_path / "file").write_text("")
    data = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path / "file"), input_size=32)
    with pytest.raises(ConfigurationError, match=r"data.init_args.cache is .*file, but nothing can be written there"):
        data.prepare_data()


def test_an_evaluation_reads_and_computes_the_test_images_alone(tmp_path, weights):
    for split, name in [("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")]:
        path = tmp_path / split / name / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(path)
    tmp_path.joinpath("train/cat/1.png").write_bytes(b"")
    images = ImageFolder(str(tmp_path), image_size=12, read_first=True)
    data = CachedFeatures(images, BACKBONE, weights=weights, cache=str(tmp_path / "cache"), input_size=32)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING), strategy=strategy)
    data.prepare_data()
    data.setup("test")
    assert [file.name.split("-")[0] for file in data.folder.glob("*.safetensors")] == ["test"]
    assert len(data.test_dataloader().dataset) == 2
    data.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(DataError, match=r"cat/1\.png"):
        data.prepare_data()


def test_a_file_is_another_one_after_a_change_of_its_name_size_or_time(tmp_path):
    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for path in paths:
        path.write_bytes(b"12345")

    def digest():
        return FileSource(list(map(str, paths)), torch.zeros(2, dtype=torch.int64)).digest(torch.arange(2))

    found = [digest(), digest()]
    assert found[0] == found[1]
    os.utime(paths[1], ns=(0, paths[1].stat().st_mtime_ns + 1))  # other bytes of the same number
    found.append(digest())
    times = paths[0].stat()
    paths[0].write_bytes(b"123456")
    os.utime(paths[0], ns=(0, times.st_mtime_ns))
    found.append(digest())
    paths[0] = paths[0].rename(tmp_path / "other.png")
    found.append(digest())
    assert len(set(found)) == 4


def test_the_length_of_features_is_that_of_the_networks_output(tmp_path):
    network = timm.create_model("mobilenetv3_small_050")  # a layer after its features stays without the classifier
    torch.save(network.state_dict(), tmp_path / "network.pth")
    weights = str(tmp_path / "network.pth")
    data = CachedFeatures(Digits(), "mobilenetv3_small_050", weights=weights, cache=str(tmp_path))
    network.reset_classifier(0)
    with torch.no_grad():
        assert network.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, data.in_channels)


def test_scattering_needs_no_weights_and_keeps_maps_in_16_bits(tmp_path):
    images = arrays(tmp_path, n=8)
    data = CachedFeatures(images, "scattering", cache=str(tmp_path / "cache"), backbone_kwargs={"angles": 2})
    data.prepare_data()
    data.setup("fit")
    paths = 1 + 2 * 2 + 4
    assert (data.in_channels, data.image_size) == (3 * paths, 3)
    pixels = torch.stack([image for image, _ in images.train_dataset]).float() / 255
    expected = ScatteringFeatures(3, angles=2)(pixels)
    kept = data._sets["train"].tensors[0]
    assert kept.dtype == torch.float16
    assert kept.shape == expected.shape
    torch.testing.assert_close(kept.float(), expected, rtol=1e-3, atol=1e-3)
    features_of, labels = next(iter(data.test_dataloader()))
    assert features_of.dtype == torch.float32
    assert features_of.shape == (10, 3 * paths, 3, 3)
    assert torch.equal(labels, images.test_dataset.labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "network.pth"}, "scattering has no weights"),
        ({"backbone_kwargs": {"scales": 0}}, "backbone_kwargs of scattering: scales and angles .* must be at least 1"),
    ],
)
def test_settings_that_scattering_does_not_have_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        CachedFeatures(arrays(tmp_path), "scattering", **settings)


def test_downloaded_weights_give_the_features_of_their_file(tmp_path, weights, monkeypatch):
    asked, create, held = [], timm.create_model, torch.load(weights, weights_only=True)

    def create_model(name, *, pretrained=False, **kwargs):
        if not pretrained or "pretrained_cfg_overlay" in kwargs:
            return create(name, pretrained=pretrained, **kwargs)
        asked.append(name)
        network = create(name, **kwargs)
        network.load_state_dict({key: value for key, value in held.items() if "classifier" not in key})
        return network

    monkeypatch.setattr(timm, "create_model", create_model)
    data = ready(arrays(tmp_path), tmp_path, None)
    assert asked == [BACKBONE]
    expected = ready(arrays(tmp_path), tmp_path, weights)
    torch.testing.assert_close(data._sets["train"].tensors[0], expected._sets["train"].tensors[0])


def test_a_cache_is_its_owners_whatever_the_umask(tmp_path, weights):
    before = os.umask(0)
    try:
        path = ready(arrays(tmp_path), tmp_path, weights).folder
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.glob("*.safetensors")} == {0o600}


@pytest.mark.parametrize("changed", ["train_images", "train_labels"])
def test_other_images_have_files_of_their_own(tmp_path, weights, changed):
    first = ready(arrays(tmp_path), tmp_path, weights)
    saved = dict(np.load(tmp_path / "images.npz"))
    np.savez(tmp_path / "images.npz", **{**saved, changed: saved[changed][::-1].copy()})
    images = NpzImages(str(tmp_path / "images.npz"), val_fraction=0.25, mean=(0.4,), std=(0.3,))
    data = ready(images, tmp_path, weights)
    assert data.folder == first.folder
    found = {split: len(list(data.folder.glob(f"{split}-*"))) for split in ("train", "val", "test")}
    assert found == {"train": 2, "val": 2, "test": 1}
    assert torch.equal(data._sets["train"].tensors[1], images.train_dataset.labels)


@pytest.mark.parametrize("change", ["weights", "size", "window", "nothing"])
def test_what_changes_features_changes_their_folder(tmp_path, weights, change):
    settings = {"weights": weights, "input_size": 32, "cache": str(tmp_path)}
    first = CachedFeatures(arrays(tmp_path), BACKBONE, **settings)
    if change == "weights":
        settings["weights"] = str(tmp_path / "other.pth")
        torch.save(timm.create_model(BACKBONE, num_classes=3).state_dict(), settings["weights"])
    elif change == "size":
        settings["input_size"] = 64
    images = arrays(tmp_path)
    images.window = (0, 100) if change == "window" else None
    other = CachedFeatures(images, BACKBONE, **settings)
    assert (other.folder == first.folder) == (change == "nothing")
