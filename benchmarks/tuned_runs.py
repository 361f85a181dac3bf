"""Runs of ``dpl fit`` with the learning rate tuned, for comparisons such as `methods.py` and `recipes.py`.

Every cell of a comparison starts from three learning rates, a factor of three apart, and continues in the better
direction while the best is at the edge, up to five in all. The rate is chosen by validation accuracy, and is then run
with more seeds. What is compared is the test accuracy after the last step. Each run is one ``dpl fit`` in a folder of
its own; a run that is finished is not repeated, so a comparison can be stopped and started again.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_FACTOR = 3.0
_MOST_RATES = 5
CLI = Path(__file__).parents[1] / "cli.py"


class Cell(NamedTuple):
    """A row of a comparison before its learning rate is known."""

    name: str
    batch_size: int
    middle: float
    """The middle one of the first three learning rates."""
    configuration: Callable[[float, int, Path], Any]
    """The settings of a run from its learning rate, its seed and its folder."""

    @property
    def runs(self) -> Path:
        """The folder of its runs, below that of the comparison."""
        return Path(f"batch_{self.batch_size}", self.name)


def base(options: argparse.Namespace, *, seed: int, rate: float, batch_size: int, folder: Path) -> dict[str, Any]:
    """What all runs have in common: a wide residual network on images in memory, and SGD with a cosine schedule."""
    return {
        "seed_everything": seed,
        "model": {"class_path": "WideResNetModule", "init_args": {"depth": options.depth, "width": options.width}},
        "data": {
            "class_path": "NpzImages",
            "init_args": {
                "path": str(options.data.resolve()),
                "num_classes": 10,
                "mean": list(options.mean),
                "std": list(options.std),
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


def run(cell: Cell, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one run, which is made unless it exists."""
    folder = options.out / cell.runs / f"lr_{rate:.3g}_seed_{seed}"
    result = folder / "result.json"
    if not result.is_file():
        _make(cell, rate, seed, folder, options)
    found: dict[str, Any] = json.loads(result.read_text())
    print(
        f"B {cell.batch_size} {cell.name} lr {rate:.3g} seed {seed}: val {found['val_accuracy_last']:.3f} "
        f"test {found['test_accuracy_last']:.3f} in {found['seconds']:.0f} s",
        flush=True,
    )
    return found


def _make(cell: Cell, rate: float, seed: int, folder: Path, options: argparse.Namespace) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(cell.configuration(rate, seed, folder), sort_keys=False))
    command = [sys.executable, str(CLI), "fit", "--config", str(folder / "run.yaml")]
    with (folder / "log.txt").open("w") as log:
        threads = {"OMP_NUM_THREADS": str(options.threads)}
        subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **threads}, check=True)


def tune(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """The best learning rate of a cell, and its results with every seed."""
    first, *others = options.seeds
    rates = [cell.middle / _FACTOR, cell.middle, cell.middle * _FACTOR]
    accuracy: dict[float, float] = {}
    while True:
        for rate in rates:
            if rate not in accuracy:
                accuracy[rate] = run(cell, rate, first, options)["val_accuracy_last"]
        best = max(accuracy, key=lambda rate: accuracy[rate])
        if len(accuracy) >= _MOST_RATES or min(accuracy) < best < max(accuracy):
            break
        rates = [best * _FACTOR if best == max(accuracy) else best / _FACTOR]
    results = [run(cell, best, seed, options)["test_accuracy_last"] for seed in (first, *others)]
    return {
        "name": cell.name,
        "batch_size": cell.batch_size,
        "rate": best,
        "at_the_edge": best in (min(accuracy), max(accuracy)),
        "tried": accuracy,
        "test": results,
    }


def compare(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    """Tune all cells, some at once, and print the table."""
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda cell: tune(cell, options), cells))
    (options.out / "table.json").write_text(json.dumps(rows, indent=1))
    print("\n| B | | lr | rates tried | test accuracy, mean | each seed |")
    print("| --- " * 6 + "|")
    for row in rows:
        each = ", ".join(f"{100 * value:.1f}" for value in row["test"])
        edge = " (edge)" if row["at_the_edge"] else ""
        print(
            f"| {row['batch_size']} | {row['name']} | {row['rate']:.3g}{edge} | {len(row['tried'])} | "
            f"{100 * statistics.mean(row['test']):.1f} | {each} |"
        )


def parser(
    description: str | None,
    names: Sequence[str],
    *,
    batch_sizes: list[int],
    mean: Sequence[float] = (0.4914, 0.4822, 0.4465),
    std: Sequence[float] = (0.2470, 0.2435, 0.2616),
) -> argparse.ArgumentParser:
    """The options that comparisons have in common.

    Args:
        description: of the comparison.
        names: of its cells, for ``--only``.
        batch_sizes: by default.
        mean: of each channel, by default; CIFAR-10's if nothing is given.
        std: likewise.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, required=True, help="images as NpzImages reads them")
    made.add_argument("--out", type=Path, required=True, help="folder of the runs")
    made.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME")
    made.add_argument("--batch-sizes", type=int, nargs="+", default=batch_sizes)
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    made.add_argument("--epsilon", type=float, default=4.0)
    made.add_argument("--mean", type=float, nargs="+", default=mean, help="of each channel, for the normalisation")
    made.add_argument("--std", type=float, nargs="+", default=std, help="likewise")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--depth", type=int, default=10)
    made.add_argument("--width", type=int, default=1)
    made.add_argument("--jobs", type=int, default=1, help="runs at once")
    made.add_argument("--threads", type=int, default=1, help="threads of each run")
    return made
