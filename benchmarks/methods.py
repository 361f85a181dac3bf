"""Trains the methods of post-processing side by side, each with its learning rate tuned.

Every method starts from three learning rates, a factor of three apart, and goes on in the better direction while the
best is at the edge, up to five in all. The rate is chosen by validation accuracy, and is then run with more seeds. What
is compared is the test accuracy after the last step. One-dimensional parameters take the same steps of DP-SGD with
every method. Each run is one ``dpl fit`` in a folder of its own; a run that is finished is not repeated, so the script
can be stopped and started again. Run ``python benchmarks/methods.py --help``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

_EMA = ("Momentum", {"beta": 0.95, "kind": "ema_nesterov"})
_HEAVY_BALL = ("Momentum", {"beta": 0.9, "kind": "heavy_ball"})
_NS = {"class_path": "Orthogonalize"}

# Transforms of the matrices, and the learning rate in the middle of the first three.
METHODS: dict[str, tuple[list[tuple[str, dict[str, Any]]], float]] = {
    "dp_sgd": ([_HEAVY_BALL], 1.0),
    "normalized": ([_EMA, ("Normalize", {})], 0.06),
    "noise_normalized": ([_EMA, ("NoiseNormalize", {})], 0.06),
    "dp_muon": ([_EMA, ("Orthogonalize", {})], 0.06),
    "dp_muon_s": ([_HEAVY_BALL, ("MagnitudeScale", {"transform": _NS})], 0.6),
    "gated": ([_EMA, ("GatedOrthogonalize", {})], 0.2),
    "gated_full_norm": ([_EMA, ("GatedOrthogonalize", {}), ("Normalize", {})], 0.06),
    "shrunk": ([_EMA, ("SpectralShrinkage", {})], 10.0),
    "shrunk_full_norm": ([_EMA, ("SpectralShrinkage", {}), ("Normalize", {})], 0.06),
    "selective": ([_EMA, ("SelectiveOrthogonalize", {})], 0.06),
    "kalman_sgd": ([("Kalman", {"process_to_measurement_ratio": 1.5})], 3.0),
    "kalman_muon": ([("Kalman", {"process_to_measurement_ratio": 1.5}), _EMA, ("Orthogonalize", {})], 0.06),
    "low_pass_muon": ([("LowPass", {}), ("Orthogonalize", {})], 0.06),
}
# Of one-dimensional parameters, with heavy-ball momentum 0.9.
_VECTOR_RATE = 1.0
_FACTOR = 3.0
_MOST_RATES = 5
_CLI = Path(__file__).parents[1] / "cli.py"


def configuration(
    method: str, rate: float, seed: int, batch_size: int, folder: Path, options: argparse.Namespace
) -> Any:
    """The settings of one run."""
    transforms, _ = METHODS[method]
    vectors = [
        ("Momentum", {"beta": 0.9, "kind": "heavy_ball", "applies_to": "vectors"}),
        ("Scale", {"factor": _VECTOR_RATE / rate, "applies_to": "vectors"}),
    ]
    return {
        "seed_everything": seed,
        "model": {"class_path": "WideResNetModule", "init_args": {"depth": options.depth, "width": options.width}},
        "data": {
            "class_path": "NpzImages",
            "init_args": {
                "path": str(options.data.resolve()),
                "num_classes": 10,
                "val_fraction": 0.1,
                "augment": False,
                "eval_batch_size": 250,
            },
        },
        "privacy": {
            "expected_batch_size": batch_size,
            "target_epsilon": options.epsilon,
            "delta": 1e-5,
            "accountant": "rdp",
            "max_physical_batch_size": 64,
        },
        "postprocess": {"transforms": [{"class_path": name, "init_args": args} for name, args in transforms + vectors]},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": rate}},
        "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_fraction": 0.05}},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": options.epochs,
            "check_val_every_n_epoch": options.epochs,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "logger": False,
            "default_root_dir": str(folder),
        },
    }


def run(method: str, rate: float, seed: int, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one run, which is made unless it is there."""
    folder = options.out / f"batch_{batch_size}" / method / f"lr_{rate:.3g}_seed_{seed}"
    result = folder / "result.json"
    if not result.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
        folder.mkdir(parents=True)
        config = configuration(method, rate, seed, batch_size, folder, options)
        (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        command = [sys.executable, str(_CLI), "fit", "--config", str(folder / "run.yaml")]
        with (folder / "log.txt").open("w") as log:
            threads = {"OMP_NUM_THREADS": str(options.threads)}
            subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **threads}, check=True)
    found: dict[str, Any] = json.loads(result.read_text())
    print(
        f"B {batch_size} {method} lr {rate:.3g} seed {seed}: val {found['val_accuracy_last']:.3f} "
        f"test {found['test_accuracy_last']:.3f} in {found['seconds']:.0f} s",
        flush=True,
    )
    return found


def tune(method: str, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The best learning rate of a method, and its results with every seed."""
    first, *others = options.seeds
    middle = METHODS[method][1]
    rates = [middle / _FACTOR, middle, middle * _FACTOR]
    accuracy: dict[float, float] = {}
    while True:
        for rate in rates:
            if rate not in accuracy:
                accuracy[rate] = run(method, rate, first, batch_size, options)["val_accuracy_last"]
        best = max(accuracy, key=lambda rate: accuracy[rate])
        if len(accuracy) >= _MOST_RATES or min(accuracy) < best < max(accuracy):
            break
        rates = [best * _FACTOR if best == max(accuracy) else best / _FACTOR]
    results = [run(method, best, seed, batch_size, options) for seed in (first, *others)]
    return {
        "method": method,
        "batch_size": batch_size,
        "rate": best,
        "at_the_edge": best in (min(accuracy), max(accuracy)),
        "tried": accuracy,
        "test": [result["test_accuracy_last"] for result in results],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="images as NpzImages reads them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    cells = [(method, batch_size) for batch_size in options.batch_sizes for method in options.methods]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda cell: tune(cell[0], cell[1], options), cells))
    (options.out / "table.json").write_text(json.dumps(rows, indent=1))
    print("\n| B | method | lr | rates tried | test accuracy, mean | each seed |")
    print("| --- " * 6 + "|")
    for row in rows:
        each = ", ".join(f"{100 * value:.1f}" for value in row["test"])
        edge = " (edge)" if row["at_the_edge"] else ""
        print(
            f"| {row['batch_size']} | {row['method']} | {row['rate']:.3g}{edge} | {len(row['tried'])} | "
            f"{100 * statistics.mean(row['test']):.1f} | {each} |"
        )


if __name__ == "__main__":
    main()
