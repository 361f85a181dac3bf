"""Features of a frozen network: computed once, right, and never those of other images."""

import fcntl
import json
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dp_lightning.cli import main
from dp_lightning.datamodules import (
    CIFAR10,
    CachedFeatures,
    Digits,
    ImageFolder,
    NpzImages,
    feature_files,
    features,
    forked,
)
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.datamodules.file_source import FileSource
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.lightning_modules import LinearProbeModule
from dp_lightning.models import pretrained
from dp_lightning.models.scattering_features import ScatteringFeatures

BACKBONE = "test_efficientnet_gn"


linux = pytest.mark.skipif(sys.platform != "linux", reason="one process computes all features")


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


@pytest.fixture
def few_per_file(monkeypatch):
    monkeypatch.setattr(features, "_PER_FILE", 16)


def arrays(folder, *, seed=0, name="images.npz", n=40):
    noise = np.random.default_rng(seed)
    np.savez(
        folder / name,
        train_images=noise.integers(0, 255, (n, 12, 12, 3), np.uint8),
        train_labels=np.arange(n) % 4,
        test_images=noise.integers(0, 255, (10, 12, 12, 3), np.uint8),
        test_labels=np.arange(10) % 4,
    )
    return NpzImages(str(folder / name), val_fraction=0.25, mean=(0.4,), std=(0.3,))


def ready(images, folder, weights, **kwargs):
    data = CachedFeatures(images, BACKBONE, weights=weights, cache=str(folder / "cache"), input_size=32, **kwargs)
    data.prepare_data()
    data.setup("fit")
    return data


def test_features_are_the_networks_of_the_images_as_it_knows_them(tmp_path, weights, few_per_file):
    images = arrays(tmp_path)
    data = ready(images, tmp_path, weights, batch_size=7)
    assert (data.num_classes, data.num_train, data.in_channels) == (4, 30, 256)
    network = timm.create_model(BACKBONE, num_classes=0).eval()
    network.load_state_dict({k: v for k, v in torch.load(weights, weights_only=True).items() if "classifier" not in k})
    for name, wanted in (("train", images.train_dataset), ("val", images.val_dataset), ("test", images.test_dataset)):
        pixels = torch.stack([image for image, _ in wanted]) * 0.3 + 0.4
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


def test_features_are_computed_once(tmp_path, weights, few_per_file, monkeypatch):
    first = ready(arrays(tmp_path), tmp_path, weights)
    again_computed = []
    compute = features._features
    monkeypatch.setattr(
        features, "_features", lambda network, images: again_computed.append(len(images)) or compute(network, images)
    )
    again = ready(arrays(tmp_path), tmp_path, weights, batch_size=3)
    assert again_computed == [2] * 4  # those that are compared with the files
    assert again.folder == first.folder
    assert torch.equal(again._sets["train"].tensors[0], first._sets["train"].tensors[0])


@linux
@pytest.mark.parametrize("num_workers", [0, 1])
def test_processes_compute_the_features_that_one_does(tmp_path, weights, few_per_file, monkeypatch, num_workers):
    alone = ready(arrays(tmp_path), tmp_path / "alone", weights, batch_size=7)
    here, compute, read = os.getpid(), features._features, ArraySource.read

    def elsewhere(network, images):
        assert os.getpid() != here
        assert torch.get_num_threads() == 1
        return compute(network, images)

    def told_to(source, *arguments):
        # Readers in several processes that share an open file move each other's position in it.
        assert (os.getpid() == here) or num_workers
        return read(source, *arguments)

    monkeypatch.setattr(features, "_features", elsewhere)
    monkeypatch.setattr(ArraySource, "read", told_to)
    torch.set_num_threads(2)
    images = arrays(tmp_path)
    images.num_workers = num_workers
    together = ready(images, tmp_path / "together", weights, batch_size=7)
    assert torch.get_num_threads() == 2
    for split, found in together._sets.items():
        torch.testing.assert_close(found.tensors, alone._sets[split].tensors)


def test_a_process_that_may_start_no_others_computes_alone(monkeypatch):
    torch.set_num_threads(2)
    assert forked.processes(5) == (2 if sys.platform == "linux" else 0)
    assert forked.processes(1) == 0
    monkeypatch.setattr(forked.multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    assert forked.processes(5) == 0


def applied(function, batches):
    """Outputs, each one number, of batches of numbers, by two processes."""
    places = forked.shared_tensor((len(batches), 1), torch.float32)
    list(forked.applied(function, batches, places.split(1), 2))
    return places[:, 0].tolist()


@linux
def test_outputs_of_processes_stand_in_the_places_of_their_batches():
    # More batches than are handed out at once, and the last one smaller.
    batches = [torch.full((3,), float(number)) for number in range(11)] + [torch.ones(2)]
    assert applied(lambda batch: batch.sum()[None], batches) == [3.0 * number for number in range(11)] + [2.0]


@linux
def test_what_fails_in_a_process_is_raised_here():
    def fails(batch):
        raise ZeroDivisionError("of this batch")

    with pytest.raises(ZeroDivisionError, match="of this batch"):
        applied(fails, [torch.ones(1)] * 9)
    assert torch.get_num_threads() == 1


@linux
def test_a_process_that_is_killed_is_told():
    with pytest.raises(ConfigurationError, match=r"was killed.*batch_size.*OMP_NUM_THREADS"):
        applied(lambda batch: os.kill(os.getpid(), signal.SIGKILL), [torch.ones(1)] * 9)


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_one_that_started_them(number):
    ended, writing = os.pipe()  # reads as ended when the last process with its other end has ended

    def waits(batch):
        os.write(writing, b"x")
        threading.Event().wait()

    def starts():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test before may have left a handler
        applied(waits, [torch.ones(1)] * 9)

    starter = multiprocessing.get_context("fork").Process(target=starts)
    starter.start()
    os.close(writing)
    try:
        assert os.read(ended, 1) + os.read(ended, 1) == b"xx"
        os.kill(starter.pid, number)
        assert os.read(ended, 1) == b""
    finally:
        starter.kill()
        starter.join()
        os.close(ended)


@pytest.mark.parametrize("removed", [False, True])
def test_two_runs_write_one_cache_one_after_the_other(tmp_path, weights, caplog, removed):
    data = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path), input_size=32)
    data.folder.mkdir(mode=0o700)
    other = os.open(data.folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as thread, caplog.at_level("INFO"):
        waiting = thread.submit(data.prepare_data)
        deadline = time.monotonic() + 60
        while "This one waits for it" not in caplog.text and not waiting.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        # The thread ends only when it has the lock, so nothing is asserted before.
        ended, told, written = waiting.done(), caplog.text, list(data.folder.iterdir())
        if removed:  # as some messages advise
            data.folder.rmdir()
        os.close(other)
        waiting.result(60)
    assert "This one waits for it" in told
    assert not ended
    assert not written
    assert len(list(data.folder.glob("*.safetensors"))) == 3
    assert data.folder.stat().st_mode & 0o777 == 0o700


@linux
def test_a_process_that_is_started_meanwhile_does_not_keep_a_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    with feature_files.held(tmp_path / "cache"):
        process = context.Process(target=time.sleep, args=(100,))
        process.start()
    try:
        other = os.open(tmp_path / "cache", os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        process.kill()
        process.join()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, weights, monkeypatch):
    (tmp_path / "file").write_text("")
    data = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path / "file"), input_size=32)
    with pytest.raises(ConfigurationError, match=r"data.init_args.cache is .*file, but nothing can be written there"):
        data.prepare_data()

    def full(*args):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(feature_files, "save_file", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\). Make room, or set data"):
        ready(arrays(tmp_path), tmp_path, weights)


def test_an_evaluation_reads_and_computes_the_test_images_alone(tmp_path, weights):
    for split, name in [("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")]:
        path = tmp_path / split / name / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(path)
    path.parents[2].joinpath("train/cat/1.png").write_bytes(b"")
    images = ImageFolder(str(tmp_path), image_size=12, read_first=True)
    data = CachedFeatures(images, BACKBONE, weights=weights, cache=str(tmp_path / "cache"), input_size=32)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING), strategy=strategy)
    data.prepare_data()
    data.setup("test")
    assert [file.name for file in data.folder.glob("*.safetensors")] == ["test-00000000.safetensors"]
    assert len(data.test_dataloader().dataset) == 2
    data.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(DataError, match=r"cat/1\.png"):
        data.prepare_data()


def test_settings_of_the_images_are_named_where_they_stand(tmp_path, weights):
    images = ImageFolder(str(tmp_path), image_size=12)
    data = CachedFeatures(images, BACKBONE, weights=weights, cache=str(tmp_path / "cache"), input_size=32)
    for look in (data.check_files, lambda: data.num_classes, lambda: data.num_train):
        with pytest.raises(DataError, match=r"set data\.init_args\.images\.init_args\.root"):
            look()
    data = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path / "cache"), input_size=32)
    with pytest.raises(ConfigurationError, match=r"Set data\.init_args\.images\.init_args\.group_folders"):
        assert data.num_train_groups


def test_images_may_be_mended_before_any_feature_is_kept(tmp_path, weights):
    paths = [tmp_path / "train" / name / f"{index}.png" for name in ("cat", "dog") for index in range(40)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(path)
    # One whose pixels are not compared with those of an earlier run.
    good = paths[71].read_bytes()
    paths[71].write_bytes(good[:40])
    with pytest.raises(DataError, match=r"dog/31\.png cannot be read.*data\.init_args\.images\.init_args\.read_first"):
        ready(ImageFolder(str(tmp_path), image_size=12, val_fraction=0.0, read_first=False), tmp_path, weights)
    paths[71].write_bytes(good)
    data = ready(ImageFolder(str(tmp_path), image_size=12, val_fraction=0.0, read_first=False), tmp_path, weights)
    assert len(data._sets["train"]) == 80


def test_an_interruption_loses_one_file_at_most(tmp_path, weights, few_per_file, monkeypatch):
    whole = ready(arrays(tmp_path), tmp_path, weights)
    files = sorted(whole.folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        "test-00000000.safetensors",
        "train-00000000.safetensors",
        "train-00000016.safetensors",
        "val-00000000.safetensors",
    ]
    kept = files[1].stat().st_mtime_ns
    files[2].unlink()
    again = ready(arrays(tmp_path), tmp_path, weights)
    assert files[1].stat().st_mtime_ns == kept
    torch.testing.assert_close(again._sets["train"].tensors[0], whole._sets["train"].tensors[0])


def test_nobody_else_can_read_the_folder(tmp_path, weights):
    assert ready(arrays(tmp_path), tmp_path, weights).folder.stat().st_mode & 0o077 == 0


def test_other_images_under_the_same_name_are_refused(tmp_path, weights):
    ready(arrays(tmp_path), tmp_path, weights)
    with pytest.raises(DataError, match=r"the train images have changed"):
        ready(arrays(tmp_path, seed=1), tmp_path, weights)


def test_one_other_image_among_many_is_refused(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(features, "_COMPARED", 1)
    data = ready(arrays(tmp_path), tmp_path, weights)
    saved = dict(np.load(tmp_path / "images.npz"))
    place = int(data.images.train_dataset.indices[7])
    saved["train_images"][place, 5, 5, 0] ^= 1
    np.savez(tmp_path / "images.npz", **saved)
    with pytest.raises(DataError, match="the train images have changed"):
        ready(NpzImages(str(tmp_path / "images.npz"), val_fraction=0.25, mean=(0.4,), std=(0.3,)), tmp_path, weights)


def test_one_other_file_among_many_is_refused(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(features, "_COMPARED", 1)
    noise = np.random.default_rng(0)
    paths = [tmp_path / "train" / name / f"{index}.png" for name in ("cat", "dog") for index in range(4)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (12, 12, 3), np.uint8)).save(path)
    ready(ImageFolder(str(tmp_path), image_size=12), tmp_path, weights)
    images = ImageFolder(str(tmp_path), image_size=12, crop_edges="mirror", read_first=True)
    assert images.num_classes == 2  # what is looked up first changes nothing
    ready(images, tmp_path, weights)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(paths[5])
    with pytest.raises(DataError, match="the train images have changed"):
        ready(ImageFolder(str(tmp_path), image_size=12), tmp_path, weights)


def test_files_that_are_not_compressed_are_compared_as_a_whole(tmp_path):
    paths = [tmp_path / f"{index}.bmp" for index in range(3)]
    for path in paths:
        Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(path)
    source = FileSource(map(str, paths), torch.zeros(3, dtype=torch.int64))
    before, size = source.digest(torch.arange(3)), paths[1].stat().st_size
    Image.fromarray(np.full((8, 8, 3), 8, np.uint8)).save(paths[1])
    assert paths[1].stat().st_size == size
    assert source.digest(torch.arange(3)) != before
    assert source.digest(torch.tensor([0, 2])) == source.digest(torch.tensor([2, 0]))


@pytest.mark.parametrize("change", ["weights", "size", "split", "network"])
def test_what_changes_features_changes_their_folder(tmp_path, weights, change):
    first = CachedFeatures(arrays(tmp_path), BACKBONE, weights=weights, cache=str(tmp_path), input_size=32)
    images, settings, backbone = arrays(tmp_path), {"weights": weights, "input_size": 32}, BACKBONE
    if change == "weights":
        torch.save(timm.create_model(BACKBONE, num_classes=3).state_dict(), tmp_path / "other.pth")
        settings["weights"] = str(tmp_path / "other.pth")
    elif change == "size":
        settings["input_size"] = 64
    elif change == "split":
        images.split_seed = 1
    else:
        backbone, settings["weights"] = "test_efficientnet_ln", str(tmp_path / "ln.pth")
        torch.save(timm.create_model(backbone, num_classes=3).state_dict(), settings["weights"])
    other = CachedFeatures(images, backbone, cache=str(tmp_path), **settings)
    assert other.folder != first.folder


@pytest.mark.parametrize("damage", ["cut", "nonsense", "flipped", "list"])
def test_a_damaged_file_is_named(tmp_path, weights, damage):
    data = ready(arrays(tmp_path), tmp_path, weights)
    path = data.folder / "train-00000000.safetensors"
    content = path.read_bytes()
    # A number of the features themselves.
    place = content.index(data._sets["train"].tensors[0][3].numpy().tobytes()) + 2
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    path.write_bytes({"cut": content[:100], "nonsense": b"nonsense" * 50, "flipped": flipped, "list": b""}[damage])
    if damage == "list":
        torch.save([1, 2], path)
    with pytest.raises(DataError, match=r"train-00000000.safetensors cannot be read.*Remove it"):
        ready(arrays(tmp_path), tmp_path, weights)


@pytest.mark.parametrize("damage", ["", "nonsense"])
def test_a_damaged_note_of_the_images_is_refused(tmp_path, weights, damage):
    data = ready(arrays(tmp_path), tmp_path, weights)
    (data.folder / "train.json").write_text(damage)
    with pytest.raises(DataError, match="Remove the folder"):
        ready(arrays(tmp_path), tmp_path, weights)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet10t", "vit_tiny_patch16_224"])
def test_the_length_of_features_is_that_of_the_networks_output(tmp_path, name):
    network = timm.create_model(name)
    torch.save(network.state_dict(), tmp_path / "network.pth")
    data = CachedFeatures(Digits(), name, weights=str(tmp_path / "network.pth"), cache=str(tmp_path))
    network.reset_classifier(0)
    with torch.no_grad():
        assert network.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, data.in_channels)


def test_a_download_does_not_change_the_folder(tmp_path, weights):
    folders = set()
    for download in (True, False):
        images = CIFAR10(str(tmp_path), download=download)
        folders.add(CachedFeatures(images, BACKBONE, weights=weights, cache=str(tmp_path)).folder)
    assert len(folders) == 1


def test_settings_out_of_range_are_refused(weights):
    with pytest.raises(ConfigurationError, match="batch_size must be a whole number of at least 1"):
        CachedFeatures(Digits(), BACKBONE, weights=weights, batch_size=0)
    with pytest.raises(ConfigurationError, match="no model 'vit_smal'"):
        CachedFeatures(Digits(), "vit_smal")


def test_normalised_features_have_one_length():
    features_of = torch.randn(5, 64) * torch.logspace(-1, 2, 5).unsqueeze(1)
    module = LinearProbeModule(3, in_channels=64)
    assert module(features_of).shape == (5, 3)
    normalised = module.model[0](features_of)
    torch.testing.assert_close(normalised.norm(dim=1), torch.full((5,), 8.0), rtol=2e-2, atol=0)
    assert sum(p.numel() for p in module.parameters()) == 64 * 3 + 3
    assert isinstance(LinearProbeModule(3, in_channels=64, normalize=False).model[0], torch.nn.Identity)


def scattered(folder, **kwargs):
    data = CachedFeatures(
        arrays(folder), "scattering", cache=str(folder / "cache"), backbone_kwargs={"angles": 2}, **kwargs
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_scattering_needs_no_weights_and_keeps_maps_in_16_bits(tmp_path, few_per_file):
    data = scattered(tmp_path)
    images = data.images
    paths = 1 + 2 * 2 + 4
    assert (data.in_channels, data.image_size) == (3 * paths, 3)
    pixels = torch.stack([image for image, _ in images.train_dataset]) * 0.3 + 0.4
    expected = ScatteringFeatures(3, angles=2)(pixels)
    kept = data._sets["train"].tensors[0]
    assert kept.dtype == torch.float16
    assert kept.shape == expected.shape
    torch.testing.assert_close(kept.float(), expected, rtol=1e-3, atol=1e-3)
    features_of, labels = next(iter(data.test_dataloader()))
    assert features_of.dtype == torch.float32
    assert features_of.shape == (10, 3 * paths, 3, 3)
    assert torch.equal(labels, images.test_dataset.labels)
    assert torch.equal(data._sets["train"][3][0], data._sets["train"].__getitems__([1, 3])[1][0])
    again = scattered(tmp_path)
    assert torch.equal(again._sets["train"].tensors[0], kept)


def test_scattering_takes_images_of_another_size_when_told(tmp_path):
    assert scattered(tmp_path, input_size=20).image_size == 5


def test_settings_of_other_networks_are_refused_for_scattering(tmp_path, weights):
    with pytest.raises(ConfigurationError, match="no network 'scatering'; did you mean scattering"):
        CachedFeatures(arrays(tmp_path), "scatering")
    with pytest.raises(ConfigurationError, match="scattering has no weights"):
        CachedFeatures(arrays(tmp_path), "scattering", weights=weights)
    with pytest.raises(ConfigurationError, match=r"no setting img_size.*scales, angles and mirror"):
        CachedFeatures(arrays(tmp_path), "scattering", backbone_kwargs={"img_size": 32})
    with pytest.raises(ConfigurationError, match="backbone_kwargs: scales of scattering must be a whole number"):
        CachedFeatures(arrays(tmp_path), "scattering", backbone_kwargs={"scales": 0})


def test_a_layer_on_maps_takes_them_at_the_length_one():
    maps = torch.randn(5, 6, 4, 4) * torch.logspace(-1, 2, 5).view(-1, 1, 1, 1)
    module = LinearProbeModule(3, in_channels=6, image_size=4, normalize="unit")
    assert module(maps).shape == (5, 3)
    torch.testing.assert_close(module.model[0](maps).norm(dim=1), torch.ones(5))
    assert module.model[0](torch.zeros(1, 6, 4, 4)).abs().max() == 0


def test_a_private_probe_from_the_command_line(tmp_path, weights):
    main(
        [
            *("fit", "--data", "CachedFeatures", "--data.images", "Digits", "--data.backbone", BACKBONE),
            *("--data.weights", weights, "--data.input_size", "32", "--data.cache", str(tmp_path / "cache")),
            *("--model", "LinearProbeModule", "--optimizer", "SGD", "--optimizer.lr", "1.0"),
            *("--privacy.expected_batch_size", "400", "--privacy.target_epsilon", "8", "--privacy.delta", "1e-4"),
            *("--privacy.accountant", "rdp", "--trainer.max_steps", "30", "--trainer.accelerator", "cpu"),
            *("--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
            *("--trainer.default_root_dir", str(tmp_path)),
        ]
    )
    result = json.loads((tmp_path / "result.json").read_text())
    # A random network's features tell digits apart far better than a guess.
    assert result["test_accuracy_last"] > 0.3
    assert result["epsilon"] <= 8
    assert len(list(Path(tmp_path / "cache").rglob("train-*.safetensors"))) == 1


@pytest.fixture
def downloads(monkeypatch, weights):
    """Names of the networks whose weights timm was asked for; it answers with those of the file."""
    asked, create = [], timm.create_model

    def create_model(name, *, pretrained=False, **kwargs):
        if not pretrained or "pretrained_cfg_overlay" in kwargs:
            return create(name, pretrained=pretrained, **kwargs)
        asked.append(name)
        network = create(name, **kwargs)
        held = torch.load(weights, weights_only=True)
        network.load_state_dict({key: value for key, value in held.items() if "classifier" not in key})
        return network

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(pretrained, "_host_is_unknown", lambda name: False)
    return asked


def test_downloaded_weights_give_the_features_of_their_file(tmp_path, weights, downloads):
    data = ready(arrays(tmp_path), tmp_path, None)
    assert downloads == [BACKBONE]
    expected = ready(arrays(tmp_path), tmp_path, weights)
    torch.testing.assert_close(data._sets["train"].tensors[0], expected._sets["train"].tensors[0])


def test_weights_are_downloaded_after_the_files_of_the_images_were_read(tmp_path, downloads, capsys):
    for place in range(12):
        folder = tmp_path / "photos" / "train" / f"class{place % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (place * 20, 0, 0)).save(folder / f"{place}.png")
    (tmp_path / "photos" / "train" / "class0" / "broken.png").write_bytes(b"not an image")
    line = ["fit", "--data", "CachedFeatures", "--data.images", "ImageFolder", "--data.backbone", BACKBONE]
    line += ["--data.images.root", str(tmp_path / "photos"), "--data.images.image_size", "16"]
    line += ["--data.cache", str(tmp_path / "cache"), "--model", "LinearProbeModule", "--optimizer", "SGD"]
    line += ["--optimizer.lr", "1.0", "--privacy.expected_batch_size", "4", "--privacy.target_epsilon", "8"]
    line += ["--privacy.delta", "1e-2", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu"]
    with pytest.raises(SystemExit):
        main([*line, "--trainer.default_root_dir", str(tmp_path)])
    assert "broken.png" in capsys.readouterr().err
    assert downloads == []


def changed(path, **changes):
    """The file with other content, and a digest that fits."""
    piece = {name: value.clone() for name, value in load_file(path).items()} | changes
    save_file(piece, path, {"digest": feature_files._digest(piece)})


def test_a_file_of_zeros_with_a_digest_that_fits_is_refused(tmp_path, weights):
    data = ready(arrays(tmp_path), tmp_path, weights)
    changed(data.folder / "train-00000000.safetensors", features=torch.zeros(30, 256))
    with pytest.raises(DataError, match=r"train-00000000\.safetensors does not hold"):
        ready(arrays(tmp_path), tmp_path, weights)


def test_a_file_of_other_labels_or_sizes_is_refused(tmp_path, weights):
    data = ready(arrays(tmp_path), tmp_path, weights)
    path = data.folder / "train-00000000.safetensors"
    changed(path, labels=torch.zeros(30, dtype=torch.int64))
    with pytest.raises(DataError, match="does not hold this network's features of these images"):
        ready(arrays(tmp_path), tmp_path, weights)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_file_with_one_number_that_is_not_finite_is_refused(tmp_path, weights, number):
    data = ready(arrays(tmp_path), tmp_path, weights)
    path = data.folder / "train-00000000.safetensors"
    features = load_file(path)["features"].clone()
    features[7, 31] = number
    changed(path, features=features)
    with pytest.raises(DataError, match="does not hold 256 finite numbers for each image"):
        ready(arrays(tmp_path), tmp_path, weights)


def test_features_of_other_hardware_are_used(tmp_path, weights):
    data = ready(arrays(tmp_path), tmp_path, weights)
    path = data.folder / "train-00000000.safetensors"
    held = load_file(path)["features"].clone()
    changed(path, features=held * (1 + 0.01 * torch.randn_like(held)))
    ready(arrays(tmp_path), tmp_path, weights)


@pytest.mark.parametrize("name", [".", "train-00000000.safetensors", "train.json"])
def test_a_cache_of_another_user_is_refused(tmp_path, weights, name, monkeypatch):
    path = ready(arrays(tmp_path), tmp_path, weights).folder / name
    lstat = Path.lstat

    def of_another(self):
        facts = lstat(self)
        return os.stat_result((*facts[:4], facts.st_uid + 1, *facts[5:])) if self == path else facts

    monkeypatch.setattr(Path, "lstat", of_another)
    with pytest.raises(DataError, match=r"belongs to another user.*data.init_args.cache"):
        ready(arrays(tmp_path), tmp_path, weights)


def test_a_cache_is_its_owners_whatever_the_umask(tmp_path, weights):
    before = os.umask(0)
    try:
        path = ready(arrays(tmp_path), tmp_path, weights).folder
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    ready(arrays(tmp_path), tmp_path, weights)


@pytest.mark.parametrize(("name", "mode"), [(".", 0o770), (".", 0o755), ("train-00000000.safetensors", 0o622)])
def test_a_cache_that_others_can_open_is_refused(tmp_path, weights, name, mode):
    path = ready(arrays(tmp_path), tmp_path, weights).folder / name
    path.chmod(mode)
    with pytest.raises(DataError, match=r"is open to other users.*chmod"):
        ready(arrays(tmp_path), tmp_path, weights)


def test_a_link_in_the_place_of_a_cache_is_refused(tmp_path, weights):
    folder = ready(arrays(tmp_path), tmp_path, weights).folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"is a link\. Features"):
        ready(arrays(tmp_path), tmp_path, weights)
