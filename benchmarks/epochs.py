"""An epoch of ``dpl fit`` on a configuration, with DP-SGD and with DP-Muon: what orthogonalization costs.

The images are random, of CIFAR-10's form, since only the time is of interest; the rows are those of the paper's table
of costs. The two methods take turns. The time of a step is that of the epoch over its logical steps, loader, noise and
optimizer included. Run ``python benchmarks/epochs.py --help``.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import yaml
from step import hardware, positive

from dp_lightning.atomic_files import replacing

ROOT = Path(__file__).resolve().parents[1]
MUON = ROOT / "configs" / "fragments" / "postprocess" / "dp_muon.yaml"
CONFIGURATIONS = {"wrn16-4": "wrn16_cifar10.yaml", "wrn28-10": "wrn28_cifar10.yaml"}
METHODS = ("DP-SGD", "DP-Muon")
# B and K of the paper's table of costs, and its overhead: WRN-16-4, float32, one A100 (Shanmugam et al. 2026).
ROWS = {(2048, 1): "2.92 %", (4096, 4): "0.77 %"}


def this_machine() -> str:
    """It and today's date."""
    return hardware("cuda" if torch.cuda.is_available() else "cpu", torch.get_num_threads())


def images(path: Path, count: int) -> None:
    """A file of random images in CIFAR-10's form."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, number in (("train", count), ("test", 100)):
        arrays[f"{split}_images"] = draw.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(number) % 10
    with replacing(path) as file:
        np.savez(file, **arrays)


def settings(options: argparse.Namespace, data: Path, batch_size: int, augmult: int, folder: Path) -> dict[str, Any]:
    """What is set beside the configuration."""
    rehearsal = {"model": {"init_args": {"depth": 10, "width": 1}}} if options.rehearse else {}
    return {
        **rehearsal,
        "data": {
            "class_path": "NpzImages",
            "init_args": {"path": str(data), "num_classes": 10, "mean": [0.5] * 3, "std": [0.25] * 3, "augment": True},
        },
        "privacy": {
            "expected_batch_size": batch_size,
            "augmult": augmult,
            "max_physical_batch_size": options.physical_batch_size,
            "accountant": "rdp",
        },
        "trainer": {
            "max_epochs": 1,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            "default_root_dir": str(folder),
        },
    }


def fit(options: argparse.Namespace, method: str, data: Path, batch_size: int, augmult: int, turn: int) -> float:
    """Milliseconds for a logical step; a run that has ended on this machine is not made again."""
    folder = options.out / f"{method}_{batch_size}_{augmult}_{turn}"
    machine, here = folder / "machine.txt", this_machine().rpartition(",")[0]
    if not machine.exists() or machine.read_text() != here:
        shutil.rmtree(folder, ignore_errors=True)
    results = sorted(folder.glob("lightning_logs/version_*/result.json"))
    if not results:
        folder.mkdir(parents=True, exist_ok=True)
        machine.write_text(here)
        overrides = folder / "settings.yaml"
        overrides.write_text(yaml.safe_dump(settings(options, data, batch_size, augmult, folder)))
        configuration = ROOT / "configs" / CONFIGURATIONS[options.model]
        also = ["--config", str(MUON)] if method == "DP-Muon" else []
        command = [sys.executable, str(ROOT / "cli.py"), "fit", "--config", str(configuration), *also]
        log = folder / "log.txt"
        with log.open("w") as file:
            done = subprocess.run(
                [*command, "--config", str(overrides)], stdout=file, stderr=subprocess.STDOUT, check=False
            )
        results = sorted(folder.glob("lightning_logs/version_*/result.json"))
        if done.returncode or not results:
            sys.exit(f"{method} failed; {log} ends with:\n" + "\n".join(log.read_text().splitlines()[-5:]))
    found = json.loads(results[-1].read_text())
    return 1e3 * float(found["seconds"]) / int(found["num_steps"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn16-4", choices=CONFIGURATIONS)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "epochs", help="a folder for the runs")
    parser.add_argument("--turns", type=positive, default=2, help="epochs of each method (default 2)")
    parser.add_argument("--physical-batch-size", type=positive, default=1024, help="default 1024")
    parser.add_argument(
        "--rehearse", action="store_true", help="a smaller network, 64 images, and logical batches of 16"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {(16, 1): "not in it"} if options.rehearse else ROWS
    count = 64 if options.rehearse else 50_000
    data = options.out / f"images_{count}.npz"
    if not data.exists():
        images(data, count)
    print(f"{this_machine()}\n")
    print("| B | K | DP-SGD, ms | DP-Muon, ms | overhead | in the paper |\n| ---: | ---: | ---: | ---: | ---: | ---: |")
    for (batch_size, augmult), paper in rows.items():
        turns = [
            [fit(options, method, data, batch_size, augmult, turn) for method in METHODS]
            for turn in range(options.turns)
        ]
        sgd, muon = (statistics.median(times) for times in zip(*turns, strict=True))
        claim = paper if options.model == "wrn16-4" else "not in it"
        print(
            f"| {batch_size} | {augmult} | {sgd:.1f} | {muon:.1f} | {100 * (muon / sgd - 1):+.2f} % | {claim} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
