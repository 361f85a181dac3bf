"""A long private run of a tiny model: whether memory, files and time per step stay what they were at the start.

The run is one of a Trainer with ``PrivacyCallback``: logical batches in one or two physical ones, a validation and a
checkpoint now and then, TensorBoard's logger. Every few hundred logical steps a line of ``soak.jsonl`` notes the
resident memory, the processor time per step since the line before, open files, threads and the size of the journal.
The run passes if memory and time per step are flat after the first thousand steps. Run
``python benchmarks/soak.py --help``.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback

EXAMPLES, BATCH = 512, 8
# Imports, caches and the allocator have settled after this many steps.
_SETTLED = 1000


class Tiny(pl.LightningModule):
    """Two linear layers, with a number logged at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("unprotected/train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(pl.Callback):
    """Writes a line every ``interval`` logical steps.

    Args:
        out: file of the lines.
        interval: logical steps between two lines.
        allocations: at the last line, print the lines of Python code that hold more memory than after the first
            thousand steps.
    """

    def __init__(self, out: Path, interval: int, *, allocations: bool = False) -> None:
        self.out, self.interval, self.allocations = out, interval, allocations
        self.lines: list[dict[str, float]] = []
        self._last = 0
        self._durations: list[float] = []
        self._before: tracemalloc.Snapshot | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._time = time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self._last:
            return  # a physical batch that is not the last one of its logical batch
        now = time.process_time()  # other processes may share the machine
        self._durations.append(now - self._time)
        self._last, self._time = step, now
        if step % self.interval == 0:
            self._note(trainer, step)
            self._durations = []
            self._time = time.process_time()

    def _note(self, trainer: pl.Trainer, step: int) -> None:
        journals = Path(trainer.log_dir or ".").glob("privacy_journal_*.jsonl")
        line = {
            "step": step,
            "resident_mib": round(resident_mib(), 2),
            # Of single steps, so that validations and checkpoints between them do not count.
            "median_ms": round(1e3 * statistics.median(self._durations), 4),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "journal_bytes": sum(path.stat().st_size for path in journals),
        }
        self.lines.append(line)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.allocations and step >= _SETTLED:
            now = tracemalloc.take_snapshot()
            if self._before is None:
                self._before = now
            elif step == trainer.max_steps:
                for growth in now.compare_to(self._before, "lineno")[:15]:
                    print(growth)


def resident_mib() -> float:
    """Memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def run(steps: int, interval: int, out: Path, *, allocations: bool = False) -> list[dict[str, float]]:
    """Train, and return the lines."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, others = (TensorDataset(torch.randn(EXAMPLES, 8), torch.arange(EXAMPLES) % 3) for _ in range(2))
    watch = Watch(out, interval, allocations=allocations)
    privacy = PrivacyCallback(
        expected_batch_size=BATCH, noise_multiplier=2.0, delta=1e-4, max_physical_batch_size=8, accountant="rdp"
    )
    epochs = max(interval * BATCH // EXAMPLES, 1)  # between validations and checkpoints
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers and logging intervals
        pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            logger=TensorBoardLogger(folder),
            log_every_n_steps=50,
            callbacks=[privacy, watch, ModelCheckpoint(every_n_epochs=epochs, save_last=True)],
            check_val_every_n_epoch=epochs,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(Tiny(), DataLoader(data, batch_size=8), DataLoader(others, batch_size=256))
    return watch.lines


def verdict(lines: Sequence[dict[str, float]], *, tolerance: float = 0.05) -> dict[str, Any]:
    """Compare the last fifth of the lines with the first fifth after the first thousand steps.

    Time per step may grow by twice ``tolerance``: clocks and caches are shared with other processes.
    """
    settled = [line for line in lines if line["step"] >= _SETTLED]
    part = max(len(settled) // 5, 1)
    first, last = settled[:part], settled[-part:]
    ratios = {
        name: statistics.median(line[name] for line in last) / statistics.median(line[name] for line in first)
        for name in ("resident_mib", "median_ms")
    }
    same = {name: first[0][name] == last[-1][name] for name in ("files", "threads")}
    limits = {"resident_mib": 1 + tolerance, "median_ms": 1 + 2 * tolerance}
    passed = all(ratio <= limits[name] for name, ratio in ratios.items()) and all(same.values())
    return {
        "passed": passed,
        "steps": lines[-1]["step"],
        **ratios,
        **{f"same_{name}": is_ for name, is_ in same.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the verdict, and exit with 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="logical steps; default: 50000")
    parser.add_argument("--every", type=int, default=500, help="steps between two lines; default: 500")
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"), help="file of the lines; default: soak.jsonl")
    parser.add_argument("--allocations", action="store_true", help="name the code whose memory grew; much slower")
    options = parser.parse_args(arguments)
    options.out.unlink(missing_ok=True)
    if options.allocations:
        tracemalloc.start()
    found = verdict(run(options.steps, options.every, options.out, allocations=options.allocations))
    print(json.dumps(found))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
