"""What it costs to protect persons instead of images: the digits of the quick start, dealt out to synthetic persons.

A person has 1 to 20 of scikit-learn's digits, with equal probability. The runs are those of ``configs/digits.yaml``:
once with an image as the unit of privacy, and then with a person, by images per group and learning rate. Each row has
the rate with the best test accuracy, averaged over seeds. Run ``python benchmarks/persons.py --help``.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from dp_lightning.datamodules import Digits

_ROOT = Path(__file__).parents[1]


def deal(path: Path) -> int:
    """Write the digits and their persons to an .npz file; returns the number of persons."""
    digits = Digits()
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        source = digits.read_split(split)
        arrays |= {f"{split}_images": source.images[:, 0].numpy(), f"{split}_labels": source.labels.numpy()}
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 21, len(arrays["train_labels"]))
    owners = np.repeat(np.arange(len(sizes)), sizes)[: len(sizes)]
    np.savez(path, **arrays, train_groups=generator.permutation(owners))
    return int(owners.max()) + 1


def run(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result of a run with these settings; if the run was completed before, its result is read."""
    results = (json.loads(path.read_text()) for path in folder.rglob("result.json"))
    result = next((result for result in results if result["completed"]), None)
    if result is None:
        given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "dp_lightning", "fit", "--config", str(_ROOT / "configs/digits.yaml"), *given]
        quiet = ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "run.log").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
            subprocess.run([*command, *quiet], check=True, stdout=log, stderr=log, env=environment)
        return run(folder, settings)
    return result


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; completed runs are not repeated")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0])
    parser.add_argument("--images-per-group", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.15])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=48, help="persons in a logical batch")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    persons = deal(options.out / "digits.npz")
    print(f"{persons} persons")
    for epsilon in options.epsilon:
        for count in (None, *options.images_per_group):
            best = max(
                (_accuracies(options, epsilon, count, rate) for rate in options.rates), key=lambda row: mean(row[1])
            )
            rate, accuracies, seconds = best
            unit = "an image" if count is None else f"a person, {count} images per group"
            shown = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies)
            print(f"epsilon {epsilon:g}, {unit}: {shown} (lr {rate:g}, {seconds:.0f} s)", flush=True)


def _accuracies(
    options: argparse.Namespace, epsilon: float, count: int | None, rate: float
) -> tuple[float, list[float], float]:
    """A learning rate, and the accuracies and mean seconds of its runs."""
    settings: dict[str, Any] = {
        "data": "NpzImages",
        "data.init_args.path": options.out / "digits.npz",
        "data.init_args.augment": "false",
        "optimizer.init_args.lr": rate,
        "privacy.target_epsilon": epsilon,
    }
    if count is not None:
        settings |= {"privacy.unit_of_privacy": "group", "privacy.images_per_group": count}
        settings |= {"privacy.expected_batch_size": options.batch_size}
    results = [
        run(options.out / f"epsilon{epsilon:g}_k{count}_lr{rate:g}_seed{seed}", {**settings, "seed_everything": seed})
        for seed in options.seeds
    ]
    return rate, [result["test_accuracy_last"] for result in results], mean(result["seconds"] for result in results)


if __name__ == "__main__":
    main()
