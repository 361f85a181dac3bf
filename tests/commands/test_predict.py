"""A run on a folder of images, from its settings to predictions for new files: nothing changes on the way."""

import csv
import inspect
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from dp_lightning import datamodules
from dp_lightning.cli import main
from dp_lightning.commands import training

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


@pytest.fixture(scope="module", params=["ImageFolder", "ImageNet"])
def run(request, images, tmp_path_factory):
    """A run of a few steps with little noise."""
    folder = tmp_path_factory.mktemp("run")
    main(
        [
            *("fit", "--model", "SmallCNNModule", "--data", request.param, "--data.root", str(images)),
            *("--data.image_size", "16", "--privacy.expected_batch_size", "9", "--privacy.noise_multiplier", "0.3"),
            *("--privacy.delta", "1e-3", "--privacy.accountant", "rdp", "--optimizer", "torch.optim.SGD"),
            *("--optimizer.lr", "2", *QUIET, "--trainer.max_steps", "10", "--trainer.default_root_dir", str(folder)),
        ]
    )
    (checkpoint,) = folder.rglob("*.ckpt")
    return folder, checkpoint


def predict(run, out, *settings):
    folder, checkpoint = run
    command = ["predict", "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)]
    main([*command, "--trainer.default_root_dir", str(out), *settings])
    with (out / "predictions.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def test_files_are_seen_as_the_test_images_were(run, images, tmp_path):
    own = predict(run, tmp_path / "own")
    found = predict(run, tmp_path / "files", "--data", "ImageFiles", "--data.root", str(images / "val"))
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


@pytest.mark.parametrize("command", ["test", "fit"])
def test_other_classes_than_those_of_the_checkpoint_are_refused(run, tmp_path, capsys, command):
    folder, checkpoint = run
    other = tree(tmp_path / "other", names=("benign", "healthy", "of no kind"))
    settings = [command, "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)]
    with pytest.raises(SystemExit):
        main([*settings, "--data.root", str(other), "--trainer.default_root_dir", str(tmp_path / "out")])
    assert "Class 1 is 'healthy' in this data and 'malignant' in the checkpoint" in capsys.readouterr().err


def test_an_export_names_the_classes_and_the_size(run, tmp_path):
    folder, checkpoint = run
    main(["export", "--ckpt-path", str(checkpoint), "--out", str(tmp_path), "--format", "safetensors"])
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["class_names"] == list(NAMES)
    image_net = "ImageNet" in (folder / "config.yaml").read_text()
    assert facts["resized_to"] == (18 if image_net else 16)


class ParsedError(Exception):
    """Ends a command after its settings are read."""


class Composition(training.TrainingCLI):
    """Hands out the settings of the data."""

    def instantiate_classes(self):
        raise ParsedError(self.config[self.config.subcommand]["data"])


@pytest.mark.parametrize("name", sorted(set(datamodules.__all__) - {"CachedFeatures", "ImageFiles", "ImageDataModule"}))
@pytest.mark.parametrize("before", [[], ["--config", "configs/digits.yaml"]], ids=["alone", "after-digits"])
def test_data_of_another_kind_has_its_own_defaults(name, before, request):
    kind = getattr(datamodules, name)
    needed = ["path", "root"]
    given = [f"--data.{n}=x" for n in needed if n in inspect.signature(kind).parameters]
    base = [str(request.config.rootpath / part) if part.endswith(".yaml") else part for part in before]
    model = [] if before else ["--model", "SmallCNNModule", "--privacy.expected_batch_size", "8"]
    with pytest.raises(ParsedError) as parsed:
        training.command_line(["fit", *base, *model, "--data", name, *given], Composition)
    (found,) = parsed.value.args
    plain = kind(**{n: "x" for n in needed if f"--data.{n}=x" in given})
    assert found.class_path.endswith(name)
    for setting in ("mean", "std", "augment", "flip", "image_size"):
        if setting in found.init_args:
            assert found.init_args[setting] == getattr(plain, setting), setting


def test_the_settings_of_imagenet_have_its_constants(request):
    with pytest.raises(ParsedError) as parsed:
        training.command_line(
            ["fit", "--config", str(request.config.rootpath / "configs" / "nf_resnet50_imagenet.yaml")], Composition
        )
    (found,) = parsed.value.args
    assert torch.tensor(found.init_args["mean"]).tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert torch.tensor(found.init_args["std"]).tolist() == pytest.approx([0.229, 0.224, 0.225])
