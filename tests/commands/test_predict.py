"""A run on a folder of images, from its settings to predictions for new files: nothing changes on the way."""

import csv
import inspect
import json
import os
import re
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps

from dp_lightning import datamodules
from dp_lightning.cli import main
from dp_lightning.commands.fit_settings import SettingsReader
from dp_lightning.lightning_modules import ImageClassifier

QUIET = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
NAMES = ("benign", "malignant", "of no kind")


def tree(folder, names=NAMES, each=6):
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(names):
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = noise.integers(60 * label, 60 * label + 120, (40 + number, 52, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("images"))


def fit(folder, *settings, model=("SmallCNNModule",)):
    """A run of a few steps with little noise: its folder and its checkpoint."""
    main(
        [
            *("fit", "--model", *model, *map(str, settings), "--privacy.expected_batch_size", "9"),
            *("--privacy.noise_multiplier", "0.3", "--privacy.delta", "1e-3", "--privacy.accountant", "rdp"),
            *("--optimizer", "torch.optim.SGD", "--optimizer.lr", "2", *QUIET, "--trainer.max_steps", "10"),
            *("--trainer.default_root_dir", str(folder)),
        ]
    )
    (checkpoint,) = folder.rglob("*.ckpt")
    return folder, checkpoint


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    data = ["--data", "ImageNet", "--data.root", images, "--data.image_size", "16"]
    return fit(tmp_path_factory.mktemp("run"), *data)


@pytest.fixture(scope="module")
def grey_run(images, tmp_path_factory):
    data = ["--data", "ImageFolder", "--data.root", images, "--data.image_size", "16", "--data.in_channels", "1"]
    return fit(tmp_path_factory.mktemp("run"), *data)


@pytest.fixture(params=["run", "grey_run"])
def each_run(request):
    return request.getfixturevalue(request.param)


def predict(run, out, *settings):
    folder, checkpoint = run
    command = ["predict", "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)]
    main([*command, "--trainer.default_root_dir", str(out), *settings])
    with (out / "predictions.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def test_files_are_seen_as_the_test_images_were(each_run, images, tmp_path):
    own = predict(each_run, tmp_path / "own")
    found = predict(each_run, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(images / "val"))
    assert len(own) == len(found) == 18
    for mine, other in zip(own, found, strict=True):
        assert [float(mine[f"p{k}"]) for k in range(3)] == [float(other[f"p{k}"]) for k in range(3)]
        assert mine["class_name"] == other["class_name"] == NAMES[int(mine["class"])]
    # The network tells the classes apart, so that a wrong mean or another crop would be seen.
    assert len({row["class"] for row in own}) > 1


def test_names_of_files_come_back_as_they_were_and_hidden_ones_are_left_out(run, images, tmp_path):
    photos = tmp_path / "photos"
    (photos / ".trash").mkdir(parents=True)
    content = (images / "val" / "benign" / "0.png").read_bytes()
    for name in (b"caf\xe9.png", "größe, 1.png".encode(), b".hidden.png", b"._a.png", b".trash/b.png"):
        with open(os.path.join(os.fsencode(photos), name), "wb") as file:
            file.write(content)
    found = predict(run, tmp_path / "out", "--data", "ImageFiles", "--data.root", str(photos))
    assert sorted(os.fsencode(os.path.basename(row["file"])) for row in found) == [
        b"caf\xe9.png",
        "größe, 1.png".encode(),
    ]


def test_predictions_are_never_overwritten(run, tmp_path, monkeypatch, capsys):
    predict(run, tmp_path)
    (tmp_path / "predictions.csv").write_text("mine")
    predicted = []  # it stops before
    monkeypatch.setattr(ImageClassifier, "predict_step", lambda *arguments: predicted.append(arguments))
    with pytest.raises(SystemExit, match="2"):
        predict(run, tmp_path)
    assert ((tmp_path / "predictions.csv").read_text(), predicted) == ("mine", [])
    said = capsys.readouterr().err
    assert f"{tmp_path / 'predictions.csv'} exists" in said
    assert "set trainer.default_root_dir to another folder" in said


def test_files_that_cannot_be_read_are_left_out_and_listed(run, images, tmp_path, capsys):
    photos = shutil.copytree(images / "val", tmp_path / "photos")
    whole = predict(run, tmp_path / "whole", "--data", "ImageFiles", "--data.root", str(photos))
    (photos / "benign" / "0.png").write_bytes(b"")
    (photos / "malignant" / "3.png").write_text("<html>not found</html>")
    (photos / "of no kind" / "5.png").write_bytes((photos / "of no kind" / "5.png").read_bytes()[:-60])
    others = [photos / name for name in ("phone.heic", "benign/scan.NII", "notes")]
    for file in others:
        file.touch()
    settings = ["--data", "ImageFiles", "--data.root", str(photos), "--data.batch_size", "4"]
    found = predict(run, tmp_path / "out", *settings, "--data.num_workers", "1")
    bad = [str(photos / name) for name in ("benign/0.png", "malignant/3.png", "of no kind/5.png")]
    assert found == [row for row in whole if row["file"] not in bad]
    printed = capsys.readouterr().out
    assert f"{bad[0]}: it is empty\n" in printed
    assert f"{bad[1]}: it is not an image of a known format" in printed
    assert f"{bad[2]}: " in printed
    assert all(f"{file}: its name does not end as those of images do\n" in printed for file in others)


def test_a_prediction_of_nothing_but_bad_files_is_an_error(run, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    for number in range(12):
        (tmp_path / "photos" / f"{number:02}.png").touch()
    with pytest.raises(SystemExit) as ended:
        predict(run, tmp_path / "out", "--data", "ImageFiles", "--data.root", str(tmp_path / "photos"))
    assert ended.value.code == 2
    assert "None of the 12 files can be read" in capsys.readouterr().err
    assert not (tmp_path / "out" / "predictions.csv").exists()


def test_other_classes_than_those_of_the_checkpoint_are_refused(run, tmp_path, capsys):
    folder, checkpoint = run
    other = tree(tmp_path / "other", names=("benign", "healthy", "of no kind"))
    settings = ["test", "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)]
    with pytest.raises(SystemExit):
        main([*settings, "--data.root", str(other), "--trainer.default_root_dir", str(tmp_path / "out")])
    said = r"The classes are .*'healthy'.* in this data and .*'malignant'.* in the checkpoint"
    assert re.search(said, capsys.readouterr().err)


def input_by_the_contract(given, path):
    """The network's input (1, C, H, W) for an image file, with PIL and what ``model.json`` says of the input."""
    assert given["layout"] == "NCHW"
    assert given["resize"]["interpolation"].startswith("bilinear, antialiased")
    assert given["exif_orientation"].startswith("applied first")
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
    if given["window"] is None:
        assert given["pixel"] == "8 bits of the file"
    else:
        assert given["pixel"].startswith(
            "(value - window[0]) / (window[1] - window[0]) * 255 of each value in the file"
        )
        low, high = given["window"]
        values = np.rint((np.array(image) - low) / (high - low) * 255)
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    image = image.convert("RGB")
    side, short = given["resize"]["shorter_side"], min(image.size)
    assert given["resize"]["longer_side"].startswith("shorter_side * longer side of the file / shorter side")
    image = image.resize([side if size == short else side * size // short for size in image.size], 2)
    high, wide = given["center_crop"]
    assert given["crop_from"].endswith("halves to the even one")
    left, top = round((image.width - wide) / 2), round((image.height - high) / 2)
    pixels = np.array(image.crop((left, top, left + wide, top + high)))
    if given["channels"].startswith("grey: (299 R + 587 G + 114 B + 500) // 1000"):
        pixels = (pixels.astype(int) @ [299, 587, 114] + 500)[..., None] // 1000
    else:
        assert given["channels"] == "RGB"
    assert (given["scale_to_range"], given["range"]) == ("pixel / 255", [0.0, 1.0])
    x = (pixels / 255 - given["mean"]) / given["std"]
    x = x.transpose(2, 0, 1)[None].astype(given["dtype"])
    assert list(x.shape[1:]) == given["shape"][1:]
    return x


@pytest.fixture
def seen(monkeypatch):
    """The images (C, H, W) that `dpl predict` gives to a network or to its features, in the order of the files."""
    images, transferred = [], datamodules.ImageFiles.on_after_batch_transfer

    def noted(data, batch, index):
        images.extend(batch[0].numpy())
        return transferred(data, batch, index)

    monkeypatch.setattr(datamodules.ImageFiles, "on_after_batch_transfer", noted)
    return images


@pytest.fixture(scope="module")
def probe(images, tmp_path_factory):
    """A linear probe on features of the same images."""
    folder = tmp_path_factory.mktemp("probe")
    torch.manual_seed(1)
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), folder / "network.pth")
    data = [
        *("--data", "CachedFeatures", "--data.images", "ImageNet", "--data.images.root", images),
        *("--data.images.image_size", "16", "--data.images.mean", "[0.3]", "--data.input_size", "32"),
        *("--data.backbone", "test_efficientnet_gn", "--data.weights", folder / "network.pth"),
        *("--data.cache", folder / "cache"),
    ]
    return fit(folder, *data, model=["LinearProbeModule"])


def test_a_probe_sees_new_files_through_its_network(probe, images, tmp_path):
    own = predict(probe, tmp_path / "own")
    found = predict(probe, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(images / "val"))
    for mine, other in zip(own, found, strict=True):
        expected = [float(mine[f"p{k}"]) for k in range(3)]
        assert [float(other[f"p{k}"]) for k in range(3)] == pytest.approx(expected, abs=1e-4)
        assert mine["class_name"] == other["class_name"]
    assert len({row["class"] for row in own}) > 1


def test_an_exported_probe_takes_images(probe, images, tmp_path, seen):
    moved = shutil.copy(probe[0] / "network.pth", tmp_path / "moved.pth")
    export = ["export", "--ckpt-path", str(probe[1]), "--feature-weights", moved, "--format", "onnx"]
    main([*map(str, export), "--out", str(tmp_path / "out")])
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["features"]["network"]["backbone"] == "test_efficientnet_gn"
    assert (facts["features"]["image_size"], facts["features"]["resized_to"]) == (16, 18)
    rows = predict(probe, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(images / "val"))
    require_what_is_predicted(tmp_path / "out", rows, seen)


def test_the_network_of_a_probe_may_lie_elsewhere_and_must_be_the_same(probe, images, tmp_path, capsys):
    folder, checkpoint = probe
    moved = (folder / "network.pth").rename(tmp_path / "moved.pth")
    arguments = [tmp_path / "again", "--data", "ImageFiles", "--data.root", str(images / "val")]
    with pytest.raises(SystemExit):
        predict(probe, *arguments)
    assert re.search(r"network\.pth, which is not a file here.*feature_weights", capsys.readouterr().err)
    assert predict(probe, *arguments, "--data.init_args.feature_weights", str(moved))
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), folder / "network.pth")
    with pytest.raises(SystemExit):
        main(["export", "--ckpt-path", str(checkpoint), "--out", str(tmp_path / "other")])
    assert "are not those that computed the features of this run" in capsys.readouterr().err
    shutil.copy(moved, folder / "network.pth")


def require_what_is_predicted(folder, rows, seen):
    """An export's folder says by itself how to get what `dpl predict` writes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    facts = json.loads((folder / "model.json").read_text())["onnx"]
    given, returned = facts["input"], facts["output"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert "softmax" in returned["meaning"]
    names = returned["class_names"]
    for row, image in zip(rows, seen, strict=True):
        x = input_by_the_contract(given, row["file"])
        # PIL and torch round some resized pixels differently, by one of 256 levels.
        assert np.abs((x[0] - image) * 255 * np.reshape(given["std"], (-1, 1, 1))).max() < 1.01
        ((logits,),) = session.run([returned["name"]], {given["name"]: image[None]})
        assert [len(logits)] == returned["shape"][1:]
        probabilities = np.exp(logits - logits.max())
        expected = [float(row[f"p{k}"]) for k in range(len(logits))]
        assert (probabilities / probabilities.sum()).tolist() == pytest.approx(expected, abs=1e-3)
        assert (names[int(row["class"])] if names else None) == row.get("class_name")
    assert max(np.ptp([float(row[f"p{k}"]) for row in rows]) for k in range(len(logits))) > 0.02


def test_an_exported_network_is_run_by_what_its_folder_says_alone(each_run, images, tmp_path, seen):
    main(["export", "--ckpt-path", str(each_run[1]), "--out", str(tmp_path / "out"), "--format", "onnx"])
    rows = predict(each_run, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(images / "val"))
    require_what_is_predicted(tmp_path / "out", rows, seen)


@pytest.mark.parametrize("probes", [False, True])
def test_a_window_and_an_orientation_are_those_of_training_everywhere(tmp_path, seen, probes, capsys):
    noise, turned = np.random.default_rng(0), Image.Exif()
    turned[274] = 6
    for split in ("train", "val"):
        for label, name in enumerate(NAMES):
            (tmp_path / "scans" / split / name).mkdir(parents=True)
            for number in range(6):
                pixels = noise.integers(1000 + 30 * label, 1080 + 30 * label, (20, 24)).astype(np.uint16)
                pixels[:10] += 40  # a turned image is another one
                file = tmp_path / "scans" / split / name / f"{number}.png"
                Image.fromarray(pixels).save(file, **({"exif": turned} if number % 2 else {}))
    data, settings, model = "--data", [], ["SmallCNNModule"]
    if probes:
        data, views = "--data.images", "{angles: 2, mirror: true, shift: true}"
        settings = ["--data", "CachedFeatures", "--data.backbone", "scattering", "--data.cache", tmp_path / "cache"]
        settings += ["--data.backbone_kwargs", views]
    settings += [data, "ImageFolder", f"{data}.root", tmp_path / "scans", f"{data}.image_size", "16"]
    settings += [f"{data}.in_channels", "1", f"{data}.window", "[1000, 1200]"]
    run = fit(tmp_path / "run", *settings, model=model)
    own = predict(run, tmp_path / "own")
    found = predict(run, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(tmp_path / "scans" / "val"))
    for mine, other in zip(own, found, strict=True):
        expected = [float(mine[f"p{k}"]) for k in range(3)]
        assert [float(other[f"p{k}"]) for k in range(3)] == pytest.approx(expected, abs=2e-3 if probes else 0)
    main(["export", "--ckpt-path", str(run[1]), "--out", str(tmp_path / "out"), "--format", "onnx"])
    require_what_is_predicted(tmp_path / "out", found, seen)
    (tmp_path / "others").mkdir()
    Image.fromarray(pixels - 800).save(tmp_path / "others" / "other_units.png")
    capsys.readouterr()
    predict(run, tmp_path / "black", "--data", "ImageFiles", "--data.root", str(tmp_path / "others"))
    assert "All pixels are equal in 1 of 1 images" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["CIFAR10", "ImageFolder", "NpzImages"])
def test_data_of_another_kind_has_its_own_defaults(name):
    kind = getattr(datamodules, name)
    needed = {setting: "x" for setting in ("path", "root") if setting in inspect.signature(kind).parameters}
    given = [f"--data.{setting}=x" for setting in needed]
    found = SettingsReader()(["--config=digits", "--data", name, *given])["data"]
    plain = kind(**needed)
    assert found["class_path"].endswith(name)
    for setting in ("mean", "std", "augment", "flip", "image_size"):
        if setting in found["init_args"]:
            own = getattr(plain, setting)
            assert found["init_args"][setting] == (list(own) if isinstance(own, tuple) else own), setting
