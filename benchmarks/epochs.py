"""An epoch of ``dpl fit`` on a configuration, with DP-SGD and with DP-Muon: what orthogonalization costs.

The images are random, of CIFAR-10's form, since only the time is of interest; the rows are those of the paper's table
of costs. The two methods take turns. The time of a step is that of the epoch over its logical steps, loader, noise and
optimizer included. A run that is finished in ``--out`` is not repeated. Run ``python benchmarks/epochs.py --help``.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from comparisons import finished_run
from measuring import ROOT, arguments, hardware, positive, table

CONFIGURATIONS = {"wrn16-4": "wrn16_cifar10", "wrn28-10": "wrn28_cifar10"}
METHODS = {"DP-SGD": [], "DP-Muon": ["dp_muon"]}
# B and K of the paper's table of costs, and its overhead: WRN-16-4, float32, one A100 (Shanmugam et al. 2026).
ROWS = {(2048, 1): "2.92 %", (4096, 4): "0.77 %"}


def write_images(path: Path, count: int) -> None:
    """Write a file of random images in CIFAR-10's form."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, number in (("train", count), ("test", 100)):
        arrays[f"{split}_images"] = draw.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(number) % 10
    np.savez(path, **arrays)


def settings(options: argparse.Namespace, data: Path, batch_size: int, augmult: int) -> dict[str, Any]:
    """What is set beside the configuration."""
    images = {"path": str(data), "num_classes": 10, "mean": [0.5] * 3, "std": [0.25] * 3, "augment": True}
    memory = {"augmult": augmult, "max_physical_batch_size": options.physical_batch_size}
    return {
        **({"model": {"init_args": {"depth": 10, "width": 1}}} if options.rehearse else {}),
        "data": {"class_path": "NpzImages", "init_args": images},
        "privacy": {"expected_batch_size": batch_size, "accountant": "rdp", **memory},
        "trainer": {"max_epochs": 1, "limit_val_batches": 0},
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="wrn16-4", choices=CONFIGURATIONS)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "epochs", help="a folder for the runs")
    parser.add_argument("--turns", type=positive, default=2, help="epochs of each method (default 2)")
    parser.add_argument("--physical-batch-size", type=positive, default=1024, help="default 1024")
    parser.add_argument("--rehearse", action="store_true", help="a smaller network, 64 images, B = 16")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(given)
    options.out.mkdir(parents=True, exist_ok=True)
    count = 64 if options.rehearse else 50_000
    data = options.out.resolve() / f"images_{count}.npz"
    if not data.exists():
        write_images(data, count)
    print(f"{hardware()}\n", flush=True)
    rows = []
    for (batch_size, augmult), paper in ({(16, 1): ""} if options.rehearse else ROWS).items():
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for turn, method in ((turn, method) for turn in range(options.turns) for method in METHODS):
            folder = options.out / f"{method}_{batch_size}_{augmult}_{turn}"
            configs = [CONFIGURATIONS[options.model], *METHODS[method]]
            result = finished_run(folder, configs, settings(options, data, batch_size, augmult))
            times[method].append(1e3 * result["seconds"] / result["num_steps"])
        sgd, muon = (statistics.median(values) for values in times.values())
        claim = paper if options.model == "wrn16-4" else ""
        rows.append((batch_size, augmult, f"{sgd:.1f}", f"{muon:.1f}", f"{100 * (muon / sgd - 1):+.2f} %", claim))
    print(table(["B", "K", "DP-SGD, ms", "DP-Muon, ms", "overhead", "in the paper"], rows))


if __name__ == "__main__":
    main()
