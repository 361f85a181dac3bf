"""Every YAML file in ``configs/`` is parsed and instantiated, alone or composed with a run."""

import copy
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback, SignalToNoise
from dp_lightning.cli import main
from dp_lightning.commands.composition import Stopped
from dp_lightning.commands.training import command_line
from dp_lightning.models.wide_resnet import WideResNet
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import RunShape
from dp_lightning.strategies.private import PrivateStrategy

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))
AVERAGING = CONFIGS / "fragments" / "averaging" / "ema.yaml"
CLUSTERS = sorted((CONFIGS / "fragments" / "clusters").glob("*.yaml"))
FRAGMENTS = sorted((CONFIGS / "fragments" / "postprocess").glob("*.yaml"))
N = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
    "tiny_imagenet": 200 * 25,
    "digits": 1437,
    "resnet50_imagenet": 6,
}
# Classes and pixels of the synthetic images on which each run takes two steps: smaller than those it is meant for.
SHAPES = {
    "svhn": (10, 16),
    "cifar100": (100, 16),
    "tiny_imagenet": (200, 16),
    "50_imagenet": (1000, 32),
    "digits": (10, 8),
}
# More than ten seconds on two busy cores, for many layers.
HEAVY = {"wrn28_cifar10", "de_wrn40_cifar10", "nf_resnet50_imagenet", "vit_small_cifar100", "vit_small_cifar100_lora"}


@functools.cache
def content(path):
    """Of a file that several tests read; whoever changes it copies it first."""
    return yaml.safe_load(path.read_text())


def data_of(path):
    return next(name for name in sorted(N, key=len, reverse=True) if name in path.stem)


def without_download(path):
    """Pretrained weights cannot be had in a test: a network drawn at random, for fewer pixels, takes their place."""
    if "vit" in path.stem:
        model = ("pretrained", "false"), ("input_size", "64"), ("model_kwargs", "{img_size: 64}")
        return [argument for name, value in model for argument in (f"--model.init_args.{name}", value)]
    return []


def instantiate(*arguments):
    """The command line up to, and without, ``fit``."""
    return command_line(list(arguments), Stopped)


@pytest.fixture
def tiny_imagenet(tmp_path):
    """The layout of Tiny-ImageNet with empty files, 25 for each class: enough to count them."""
    words = [f"n{k:08d}" for k in range(200)]
    (tmp_path / "wnids.txt").write_text("\n".join(words))
    for word in words:
        folder = tmp_path / "train" / word / "images"
        folder.mkdir(parents=True)
        for i in range(25):
            (folder / f"{word}_{i}.JPEG").touch()
    (tmp_path / "val" / "images").mkdir(parents=True)
    (tmp_path / "val" / "images" / "val_0.JPEG").touch()
    (tmp_path / "val" / "val_annotations.txt").write_text(f"val_0.JPEG\t{words[0]}\t0\t0\t1\t1\n")
    return tmp_path


@pytest.fixture
def imagenet(tmp_path):
    """The layout of ImageNet with six small images."""
    for split in ("train", "val"):
        for label in range(2):
            for number in range(3):
                folder = tmp_path / split / f"n{label:08d}"
                folder.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (20, 20), (80 * number, 60, 60)).save(folder / f"{number}.JPEG")
    return tmp_path


def probe_of_small_network(folder):
    """Settings that put a small network with weights in a file in the place of the one that is downloaded."""
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), folder / "small.pth")
    return [
        *("--data.init_args.backbone", "test_efficientnet_gn", "--data.init_args.weights", str(folder / "small.pth")),
        *("--data.init_args.cache", str(folder / "features"), "--data.init_args.input_size", "32"),
    ]


def fewer_layers(path):
    """For a run that takes steps: what repeats in the largest networks is there fewer times."""
    if "nf_resnet50" in path.stem:
        return ["--model.init_args.name", "nf_resnet26"]
    if "wrn" in path.stem:
        return ["--model.init_args.depth", "10"]
    return ["--model.init_args.model_kwargs", "{img_size: 64, depth: 2}"] if "vit" in path.stem else []


def put_images(config, settings):
    """Let a run train on the images of a file, or on their features."""
    images = {"class_path": "NpzImages", "init_args": settings}
    if config["data"]["class_path"] == "CachedFeatures":
        config["data"]["init_args"]["images"] = images
    else:
        config["data"] = images


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in HEAVY else [], id=path.stem) for path in RUNS],
)
def test_every_run_takes_steps_on_synthetic_images(path, tmp_path):
    classes, size = next((shape for name, shape in SHAPES.items() if name in path.stem), (10, 16))
    noise = np.random.default_rng(0)
    channels = 1 if path.stem == "digits" else 3
    images = noise.integers(0, 255, (12, size, size, channels), np.uint8)
    labels = np.arange(12) % classes
    np.savez(
        tmp_path / "synthetic.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:2],
        test_labels=labels[:2],
    )
    config = copy.deepcopy(content(path))
    synthetic = {"path": str(tmp_path / "synthetic.npz"), "num_classes": classes, "eval_batch_size": 2}
    put_images(config, synthetic)
    if config["data"]["class_path"] == "CachedFeatures":
        config["data"]["init_args"]["cache"] = str(tmp_path / "features")
    config["trainer"] |= {"max_steps": 2, "max_epochs": -1, "check_val_every_n_epoch": 1, "accelerator": "cpu"}
    config["trainer"] |= {"logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    config["privacy"] |= {"expected_batch_size": 2, "delta": 1e-2, "accountant": "rdp"}
    if "augmult" in config["privacy"]:
        config["privacy"]["augmult"] = 2  # as good as 16, and eight times faster
    config["privacy"]["max_physical_batch_size"] = 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    probe = probe_of_small_network(tmp_path) if "probe" in path.stem else []
    main(["fit", "--config", str(tmp_path / "run.yaml"), *without_download(path), *fewer_layers(path), *probe])
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["num_steps"] == 2
    assert ("augmult" in facts["clipping"]) == ("augmult" in config["privacy"])
    assert json.loads((tmp_path / "result.json").read_text())["test_accuracy_last"] is not None


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_instantiates_and_plans_for_its_data(path, request, tmp_path):
    arguments = ["fit", "--config", str(path), "--trainer.accelerator", "cpu"]
    if "imagenet" in path.stem:
        root = request.getfixturevalue("tiny_imagenet" if "tiny" in path.stem else "imagenet")
        arguments += ["--data.init_args.root", str(root)]
    if "50_imagenet" in path.stem:  # of which there are six images here
        arguments += ["--privacy.expected_batch_size", "2", "--privacy.delta", "1e-3"]
    if "probe" in path.stem:
        arguments += probe_of_small_network(tmp_path)
    cli = instantiate(*arguments, *without_download(path), "--trainer.default_root_dir", str(tmp_path))
    data = data_of(path)
    assert cli.privacy.num_train == cli.datamodule.num_train == N[data]
    assert cli.model.hparams.num_classes == cli.datamodule.num_classes
    assert isinstance(cli.trainer.callbacks[0], PrivacyCallback)
    assert isinstance(cli.trainer.callbacks[1], SignalToNoise)
    assert isinstance(cli.trainer.callbacks[2], PostProcessCallback)
    cli.privacy.accountant = "rdp"  # the cheapest; calibration itself is tested elsewhere
    cli.privacy.check(cli.trainer, cli.model)
    plan = cli.privacy.make_plan(cli.privacy.shape_for(cli.trainer, cli.privacy.num_train))
    by_epochs = cli.trainer.max_epochs * max(1, round(plan.num_train / plan.expected_batch_size))
    assert plan.num_steps == (by_epochs if cli.trainer.max_steps == -1 else cli.trainer.max_steps)
    assert plan.epsilon() <= cli.privacy.target_epsilon


def test_runs_of_the_paper_and_of_the_evidence_take_the_steps_of_their_epochs():
    """That is floor(E N / B), where E epochs of a fit are E round(N / B)."""
    images = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "tiny_imagenet": 100_000}
    for path in RUNS:
        if "floor(" in path.read_text():
            privacy, trainer = content(path)["privacy"], content(path)["trainer"]
            of_run, epochs = (1_281_167, 120) if "resnet50" in path.stem else (images[data_of(path)], 50)
            assert trainer["max_steps"] == epochs * of_run // privacy["expected_batch_size"], path
            assert trainer["max_epochs"] == -1
    for path in sorted((CONFIGS / "grids").glob("*.yaml")):
        of_run, epochs = (45_000, 3) if path.stem.startswith("ortho") else (None, 50)
        sizes = content(path)["axes"].get("batch_size", {})
        for size, point in {} if "values" in sizes else sizes.items():
            of_point = of_run or images[data_of(path.parent / content(path)["base"][0])]
            assert point["settings"]["privacy.expected_batch_size"] == size
            assert point["settings"]["trainer.max_steps"] == epochs * of_point // size, path


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_every_method_trains(path, tmp_path):
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    main(
        [
            *("fit", "--config", str(CONFIGS / "digits.yaml"), "--config", str(path), *quiet),
            *("--trainer.max_steps", "2", "--trainer.default_root_dir", str(tmp_path)),
            *("--privacy.accountant", "rdp"),
        ]
    )
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    names = [entry["class_path"] for entry in content(path)["postprocess"]["transforms"]]
    assert facts["num_steps"] == 2
    assert facts["postprocessing"] == (", then ".join(names) or "none")


def test_views_and_an_average_of_weights_compose_with_a_run(tmp_path):
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    main(
        [
            *("fit", "--config", str(CONFIGS / "digits.yaml"), "--config", str(AVERAGING)),
            *("--privacy.augmult", "4", "--privacy.accountant", "rdp", *quiet),
            *("--trainer.max_steps", "6", "--trainer.default_root_dir", str(tmp_path)),
        ]
    )
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["clipping"]["augmult"] == "4 views of each example"
    assert "moving average of the weights (decay 0.999" in facts["postprocessing"]
    assert facts["sensitivity"] == 1.0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["test_accuracy_last"] > 0
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    main(
        [
            *("test", "--config", str(tmp_path / "config.yaml"), "--ckpt_path", str(checkpoint)),
            *("--trainer.default_root_dir", str(tmp_path / "again")),
        ]
    )


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_composes_with_a_run_and_saves_often(path, tmp_path):
    cli = instantiate(
        *("fit", "--config", str(CONFIGS / "digits.yaml"), "--config", str(path)),
        *("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.num_nodes", "1"),
        *("--trainer.default_root_dir", str(tmp_path)),
    )
    assert isinstance(cli.trainer.strategy, PrivateStrategy)
    by_epoch, by_steps = cli.trainer.checkpoint_callbacks
    # The second one alone would leave out the last steps.
    assert by_epoch._every_n_epochs == 1
    assert by_steps._every_n_train_steps == 25
    cli.privacy.check(cli.trainer, cli.model)


def test_the_literal_reading_clips_each_layer_to_one_and_counts_only_one_of_them():
    grid = yaml.safe_load((CONFIGS / "grids" / "literal_per_layer.yaml").read_text())
    names = [name for name, _ in WideResNet(10, 1, 10).named_parameters()]
    settings = grid["axes"]["reading"]["S taken as C (NOT PRIVATE)"]["settings"]
    plan = ClipPlan.per_layer(max_grad_norm=settings["privacy.max_grad_norm"])
    layers = plan.groups(names)
    assert plan.bounds(layers) == pytest.approx([1.0] * len(layers), rel=1e-4)
    # The noise is that of a whole gradient of norm 1 at epsilon 4, and the plan of the run knows better.
    size, steps = grid["settings"]["privacy.expected_batch_size"], grid["settings"]["trainer.max_steps"]
    shape = RunShape(num_train=45_000, expected_batch_size=size, num_steps=steps, delta=1e-5)
    noise = settings["privacy.noise_multiplier"]
    assert noise * plan.sensitivity == pytest.approx(shape.calibrate(4.0).noise_multiplier, rel=1e-3)
    assert shape.with_noise(noise).epsilon() == pytest.approx(168.0, abs=0.1)


def test_settings_are_overridden_on_the_command_line(tmp_path):
    cli = instantiate(
        *("fit", "--config", str(CONFIGS / "digits.yaml"), "--trainer.default_root_dir", str(tmp_path)),
        *("--privacy.target_epsilon", "8", "--privacy.clipping", "per_layer", "--optimizer.init_args.lr", "0.7"),
        *("--data.init_args.val_fraction", "0.1", "--trainer.max_steps", "3", "--privacy.num_train", "1293"),
    )
    assert cli.privacy.target_epsilon == 8
    assert cli.privacy.clip_plan.kind == "per_layer"
    assert cli.privacy.num_train == cli.datamodule.num_train == 1293 == 1437 - 144
    assert cli.trainer.max_steps == 3


def test_a_class_whose_settings_are_all_comments_has_its_defaults(tmp_path):
    path = tmp_path / "commented.yaml"
    path.write_text(
        "model:\n  class_path: LinearProbeModule\n  init_args:\n    # normalize: unit\n"
        "data:\n  class_path: CachedFeatures\n  init_args:\n    backbone: scattering\n    images:\n"
        "      class_path: Digits\n      init_args:\n        # val_fraction: 0.1\n"
        "postprocess:\n  # transforms: []\nlr_scheduler:\n  class_path: WarmupCosine\n  init_args:\n"
        "privacy: {target_epsilon: 3.0, delta: 1.0e-4, expected_batch_size: 512}\n"
        f"trainer: {{default_root_dir: {tmp_path}, max_steps: 3, callbacks: "
        "[{class_path: LearningRateMonitor, init_args: }]}\n"
    )
    cli = instantiate("fit", "--config", str(path))
    assert cli.model.hparams.normalize is True
    assert cli.datamodule.num_train == 1437
    assert any(type(callback).__name__ == "LearningRateMonitor" for callback in cli.trainer.callbacks)
