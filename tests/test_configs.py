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
from dp_lightning.commands.fit_settings import Stopped
from dp_lightning.commands.training import command_line
from dp_lightning.models.wide_resnet import WideResNet
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import RunShape
from dp_lightning.strategies.private import PrivateStrategy

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))
AVERAGING = CONFIGS / "fragments" / "averaging" / "ema.yaml"
CLUSTERS = sorted((CONFIGS / "fragments" / "clusters").glob("*.yaml"))
N = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
    "tiny_imagenet": 400,
    "digits": 1437,
    "resnet50_imagenet": 6,
}
# The runs that take steps here, one for each kind: the others differ in numbers and images alone, and those that
# test_fit_on_a_device.py names are run there.
KINDS = ("de_wrn16_cifar10", "nf_resnet50_imagenet", "probe_cifar10", "scattering_network_cifar10")
KINDS += ("resnet18_cifar10", "vit_small_cifar100_lora")
# The same of the methods: an optimizer, a transform, one that knows the noise, and a mechanism.
METHODS = ("dp_adamw", "dp_muon", "selective_muon", "disk_full_sgd")
QUIET = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]


@functools.cache
def content(path):
    """Of a file that several tests read; whoever changes it copies it first."""
    return yaml.safe_load(path.read_text())


def data_of(path):
    return next(name for name in sorted(N, key=len, reverse=True) if name in path.stem)


def smaller(path, folder):
    """Settings of a run with fewer layers and pixels, and with weights drawn at random in the place of a download."""
    if "vit" in path.stem:
        small = {"pretrained": "false", "input_size": "64", "model_kwargs": "{img_size: 64, depth: 1}"}
    elif "nf_resnet50" in path.stem:
        small = {"name": "test_nfnet"}
    else:
        small = {"depth": "10"} if "wrn" in path.stem else {}
    arguments = [argument for name, value in small.items() for argument in (f"--model.init_args.{name}", value)]
    if "scattering" in path.stem:
        arguments += ["--data.init_args.backbone_kwargs", "{scales: 1, angles: 2, mirror: true, shift: true}"]
    if "probe" in path.stem:
        torch.save(timm.create_model("test_efficientnet_gn").state_dict(), folder / "small.pth")
        arguments += ["--data.init_args.backbone", "test_efficientnet_gn", "--data.init_args.input_size", "32"]
        arguments += ["--data.init_args.weights", str(folder / "small.pth")]
    return arguments


def small_run(path, folder, *, trainer, privacy):
    """The command of a run on twelve random images of ten classes."""
    size = 32 if "50_imagenet" in path.stem else 16
    pixels, labels = np.random.default_rng(0).integers(0, 255, (12, size, size, 3), np.uint8), np.arange(12) % 10
    arrays = {"train_images": pixels, "train_labels": labels, "test_images": pixels[:2], "test_labels": labels[:2]}
    np.savez(folder / "synthetic.npz", **arrays)
    settings = {"path": str(folder / "synthetic.npz"), "num_classes": 10, "eval_batch_size": 2}
    images = {"class_path": "NpzImages", "init_args": settings}
    config = copy.deepcopy(content(path))
    if config["data"]["class_path"] == "CachedFeatures":
        config["data"]["init_args"] |= {"images": images, "cache": str(folder / "features")}
    else:
        config["data"] = images
    config["trainer"] |= {"max_epochs": -1, "default_root_dir": str(folder), **trainer}
    config["privacy"] |= {"delta": 1e-2, "accountant": "rdp", **privacy}
    if "augmult" in config["privacy"]:
        config["privacy"]["augmult"] = 2  # as good as 16, and eight times faster
        config["privacy"]["max_physical_batch_size"] *= 2
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(folder / "run.yaml"), *QUIET, *smaller(path, folder)]


def instantiate(*arguments):
    """The command line up to, and without, ``fit``."""
    return command_line(list(arguments), Stopped)


@pytest.fixture
def tiny_imagenet(tmp_path):
    """The layout of Tiny-ImageNet with empty files, two for each class: enough to count them."""
    words = [f"n{k:08d}" for k in range(200)]
    (tmp_path / "wnids.txt").write_text("\n".join(words))
    for word in words:
        folder = tmp_path / "train" / word / "images"
        folder.mkdir(parents=True)
        for i in range(2):
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


@pytest.mark.parametrize("stem", KINDS)
def test_every_kind_of_run_takes_steps_on_synthetic_images(stem, tmp_path):
    path = CONFIGS / f"{stem}.yaml"
    privacy = {"expected_batch_size": 2, "max_physical_batch_size": 2}
    main(small_run(path, tmp_path, trainer={"max_steps": 2, "check_val_every_n_epoch": 1}, privacy=privacy))
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["num_steps"] == 2
    assert ("augmult" in facts["clipping"]) == ("augmult" in content(path)["privacy"])
    assert json.loads((tmp_path / "result.json").read_text())["test_accuracy_last"] is not None


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_instantiates_and_plans_for_its_data(path, request, tmp_path):
    arguments = ["fit", "--config", str(path), "--trainer.accelerator", "cpu"]
    if "imagenet" in path.stem:
        root = request.getfixturevalue("tiny_imagenet" if "tiny" in path.stem else "imagenet")
        arguments += ["--data.init_args.root", str(root)]
        arguments += ["--privacy.expected_batch_size", "2", "--privacy.delta", "1e-3"]  # there are a few images
    if content(path)["data"]["class_path"] == "CachedFeatures":
        arguments += ["--data.init_args.cache", str(tmp_path / "features")]
    cli = instantiate(*arguments, *smaller(path, tmp_path), "--trainer.default_root_dir", str(tmp_path))
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
        of_run, epochs = (45_000, 3) if path.stem.startswith(("ortho", "bands")) else (None, 50)
        sizes = content(path)["axes"].get("batch_size", {})
        for size, point in {} if "values" in sizes else sizes.items():
            of_point = of_run or images[data_of(path.parent / content(path)["base"][0])]
            assert point["settings"]["privacy.expected_batch_size"] == size
            assert point["settings"]["trainer.max_steps"] == epochs * of_point // size, path


@pytest.mark.parametrize("stem", METHODS)
def test_every_kind_of_method_trains(stem, tmp_path):
    path = CONFIGS / "fragments" / "postprocess" / f"{stem}.yaml"
    main(
        [
            *("fit", "--config", str(CONFIGS / "digits.yaml"), "--config", str(path), *QUIET),
            *("--trainer.max_steps", "2", "--trainer.default_root_dir", str(tmp_path)),
            *("--privacy.accountant", "rdp"),
        ]
    )
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    names = [entry["class_path"] for entry in content(path)["postprocess"]["transforms"]]
    assert facts["num_steps"] == 2
    assert facts["postprocessing"] == (", then ".join(names) or "none")


def test_views_and_an_average_of_weights_compose_with_a_run(tmp_path):
    main(
        [
            *("fit", "--config", str(CONFIGS / "digits.yaml"), "--config", str(AVERAGING)),
            *("--privacy.augmult", "4", "--privacy.accountant", "rdp", *QUIET),
            *("--trainer.max_steps", "2", "--trainer.default_root_dir", str(tmp_path)),
        ]
    )
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["clipping"]["augmult"] == "4 views of each example"
    assert "moving average of the weights (decay 0.999" in facts["postprocessing"]
    assert facts["sensitivity"] == 1.0


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
