"""Whole runs through a Lightning Trainer, with and without privacy, beside Opacus in its own loop.

Each way of a run has its own process, and the processes train in turns of a few logical steps, one at a time. A step is
all from the end of one to the end of the next: reading, gradients, noise, journal, accountant, optimizer and logging.
An ordinary step takes B examples, and a private one draws B on average. The time of a step is the median over turns;
that of an epoch is the mean over turns for all its steps, with what only some steps do. The first step is timed from
the start of ``trainer.fit``, or of ``make_private``. Run ``python benchmarks/runs.py --help``.
"""

import argparse
import inspect
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from measuring import arguments, hardware, positive, table, write_json
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from PIL import Image
from step import Answers, measure
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from training_steps import MODELS, made_private

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.datamodules import Digits, ImageNet
from dp_lightning.datamodules.decoding import open_image
from dp_lightning.models.trained import train_low_rank, train_only

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The ways beside ordinary training, with settings of PrivacyCallback for ours; the first four by default.
WAYS: dict[str, dict[str, Any]] = {
    "ours flat": {},
    "ours per-layer": {"clipping": "per_layer"},
    "Opacus hooks": {},
    "Opacus ghost": {},
    "ours, 16 bands": {"bands": 16},
}
# A part of our step is the time in these methods of a class, without that in the other parts that they call.
PARTS: dict[str, tuple[str, ...]] = {
    "read": ("dp_lightning.private_run.logical_batches:PhysicalLoader", "next_step"),
    "forward, backward": ("dp_lightning.privacy.gradients.recording:Recording", "run", "backward"),
    "isolation": ("dp_lightning.privacy.isolation:Isolation", "begin", "together", "end"),
    "clip": ("dp_lightning.privacy.gradients.clipped_sum:ClippedSum", "reset", "begin", "take", "end"),
    "noise": ("dp_lightning.privacy.noise:GaussianNoise", "add_to"),
    "journal": ("dp_lightning.privacy.record:RunRecord", "count"),
    "accountant": ("dp_lightning.private_run.run:Budget", "at"),
    "logging": ("dp_lightning.private_run.step_logging:StepLogging", "logical_batch", "physical_batch"),
}
GoesOn = Callable[[int], bool]
"""Whether to take another step after so many logical steps; of none it returns when the run is to begin."""


class Run(NamedTuple):
    """Training a network of ``MODELS`` in steps of ``batch_size`` examples, ``turn`` steps in a turn."""

    model: str
    batch_size: int
    num_train: int
    turn: int = 1
    pieces: int = 1
    """Physical batches of a step."""
    epochs: int = 30
    choose: Callable[..., None] = lambda model, head: None
    """Freezes what is not trained."""
    workers: int | None = None
    """Processes that read JPEG files; None takes examples from memory."""

    @property
    def steps(self) -> int:
        """Logical steps of an epoch."""
        return round(self.num_train / self.batch_size)

    @property
    def limit(self) -> int:
        """Most rows of a physical batch; where a step has one, few draws have more than 2 B examples."""
        return self.batch_size // self.pieces if self.pieces > 1 else 2 * self.batch_size


LORA = partial(train_low_rank, rank=8, layers=("*.attn.qkv", "*.attn.proj"))
RUNS = {
    "digits": Run("small-cnn", 512, 1437, turn=3, epochs=53),
    "small CNN, 64": Run("mnist-small", 64, 61_440, turn=64, epochs=15),
    "small CNN, 512": Run("mnist-small", 512, 61_440, turn=16, epochs=15),
    "large CNN, 64": Run("mnist-large", 64, 61_440, turn=16, epochs=15),
    "large CNN, 512": Run("mnist-large", 512, 61_440, turn=2, epochs=15),
    # Their draws have all examples: without, they would differ in size by far more than ways differ in time.
    "ResNet-18, 64": Run("resnet18", 64, 64, epochs=500),
    "WRN-16-4, 64": Run("wrn16-4", 64, 64, epochs=500),
    "ViT-S/16, 8": Run("vit-s16", 8, 8, epochs=500),
    "ViT-S/16, 8 x 8": Run("vit-s16", 64, 64, pieces=8, epochs=500),
    "ViT-S/16, LoRA, 8": Run("vit-s16", 8, 8, epochs=500, choose=LORA),
    "ViT-S/16, head, 8": Run("vit-s16", 8, 8, epochs=500, choose=train_only),
    "WRN-16-4, 8 x 64": Run("wrn16-4", 512, 16_384, pieces=8),
    "features, 8192": Run("features", 8192, 49_152, turn=6, epochs=50),
    "JPEG files": Run("pooled", 64, 1024, turn=16, workers=0),
    "JPEG files, 2 workers": Run("pooled", 64, 1024, turn=16, workers=2),
}


class Job(NamedTuple):
    """What one process trains; ``timed`` is whether the parts of its steps are timed."""

    run: str
    way: str
    threads: int
    timed: bool


class Classifier(pl.LightningModule):
    """A network of a run with cross-entropy, which logs its loss, and fits until ``goes_on(steps)`` returns False."""

    def __init__(self, run: Run, goes_on: GoesOn) -> None:
        super().__init__()
        self.model: Any = MODELS[run.model][0]()
        run.choose(self.model, getattr(self.model, "head", None))
        self._goes_on = goes_on

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if not self._goes_on(self.trainer.global_step):
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


def data_of(job: Job, folder: str) -> Any:
    """The data module of a run. Ordinary training reads files by torchvision's data set, with the same transforms."""
    run = RUNS[job.run]
    if job.run == "digits":
        return Digits(eval_batch_size=run.batch_size)  # which is the size of ordinary batches too
    if run.workers is None:
        images = torch.randn(run.num_train, *MODELS[run.model][1])
        data = TensorDataset(images, torch.arange(len(images)) % 10)
        return pl.LightningDataModule.from_datasets(data, batch_size=run.batch_size // run.pieces)
    image = Image.effect_noise((120, 100), 60).resize((473, 402)).convert("RGB")  # of ImageNet's mean size
    for number in range(run.num_train):
        path = Path(folder, "train", str(number % 10), f"{number}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)
    # Without a look at all files before the run, which torchvision does not take.
    own = ImageNet(folder, read_first=False, num_workers=run.workers)
    if job.way == "ordinary":
        theirs = ImageFolder(str(Path(folder, "train")), own.train_transform(), loader=open_image)
        more = {"num_workers": run.workers, "persistent_workers": run.workers > 0}
        vars(own)["train_dataloader"] = lambda: DataLoader(theirs, run.batch_size, shuffle=True, **more)
    return own


def through_a_trainer(job: Job, data: Any, goes_on: GoesOn) -> None:
    """Fit."""
    run, callbacks = RUNS[job.run], list[pl.Callback]()
    module = Classifier(run, goes_on)
    if job.way != "ordinary":
        plan = {"expected_batch_size": run.batch_size, "noise_multiplier": 4.0, "delta": 1e-6}
        callbacks.append(PrivacyCallback(**plan, max_physical_batch_size=run.limit, **WAYS[job.way]))
    with TemporaryDirectory() as folder, redirect_stdout(None):
        trainer = pl.Trainer(
            max_steps=run.epochs * run.steps,
            accumulate_grad_batches=run.pieces if job.way == "ordinary" else 1,
            callbacks=callbacks,
            devices=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        goes_on(0)
        trainer.fit(module, datamodule=data)


def by_opacus(job: Job, data: Any, goes_on: GoesOn) -> None:
    """Train in Opacus' own loop."""
    run, engine = RUNS[job.run], PrivacyEngine()
    module, loader = Classifier(run, goes_on).to(DEVICE), DataLoader(data.train_dataloader().dataset, run.batch_size)
    goes_on(0)
    made = made_private(engine, module.model.train(), module.configure_optimizers(), loader, job.way.split()[1])
    model, optimizer, criterion, loader = made
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=run.limit, optimizer=optimizer) as physical:
        while True:
            for batch in physical:
                images, labels = (each.to(DEVICE) for each in data.on_after_batch_transfer(batch, 0))
                optimizer.zero_grad()
                criterion(model(images), labels).backward()
                optimizer.step()
                if not goes_on(sum(count for *_, count in engine.accountant.history)):
                    return


def time_parts(seconds: Counter[str]) -> None:
    """Add to ``seconds`` what each part takes from now on; of generators and context managers, only their own code."""
    within = [0.0]

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = time.perf_counter()
        within.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            seconds[part] += took - within.pop()
            within[-1] += took

    def around(part: str, method: Any) -> Any:
        inner = inspect.unwrap(method)
        if not inspect.isgeneratorfunction(inner):
            return timed(part)(method)

        def generate(*args: Any) -> Iterator[Any]:
            generator = inner(*args)
            while True:
                with timed(part):
                    item = next(generator, generator)
                if item is generator:
                    return
                yield item

        return generate if inner is method else contextmanager(generate)

    for part, (path, *names) in PARTS.items():
        owner = resolve_name(path)
        for name in names:
            setattr(owner, name, around(part, getattr(owner, name)))


def work(job: Job, parent: Connection) -> None:
    """Take a turn whenever the parent asks for one: the first step, the rest of the first turn, then whole turns."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(job.threads)
    # Let a loader start its workers, which a daemon may not, and as in a script, not as step.py starts this process.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)
    before = -1

    def goes_on(steps: int) -> bool:
        nonlocal before
        new, before = steps > before, steps
        return answers.goes_on() if new and (steps == 1 or steps % RUNS[job.run].turn == 0) else True

    with TemporaryDirectory() as folder:
        data = data_of(job, folder)
        answers = Answers(DEVICE, parent)
        if job.timed:
            time_parts(answers.parts)
        (by_opacus if job.way.startswith("Opacus") else through_a_trainer)(job, data, goes_on)


def shown(rows: list[dict[str, Any]]) -> str:
    """The table of the ways of a run, and one of the parts of our steps where they are timed, in ms."""
    lines, of_parts = [], []
    for row in rows:
        run, name = RUNS[row["run"]], row["run"]
        if "error" in row:
            lines.append([name, row["way"], row["error"], *[""] * 6])
            continue
        row["step"], mean = row["seconds"] / run.turn, fmean(row["times"]) / run.turn
        row["epoch"] = mean * run.steps
        ratios = (f"{row[key] / rows[0][key]:.2f}" if key in rows[0] else "" for key in ("step", "epoch", "peak_mib"))
        line = [name, row["way"], f"{row['first']:.2f}", f"{1e3 * row['step']:.1f}", next(ratios)]
        lines.append([*line, f"{row['epoch']:.2f}", next(ratios), row["peak_mib"], next(ratios)])
        if row["parts"][0]:
            each = {part: fmean(turn.get(part, 0.0) for turn in row["parts"]) / run.turn for part in PARTS}
            milliseconds = (1e3 * seconds for seconds in (*each.values(), mean - sum(each.values())))
            of_parts.append([name, row["way"], *(f"{each:.2f}" for each in milliseconds)])
    head = ["run", "way", "s to the first step", "ms a step", "ratio", "s an epoch", "ratio", "MiB", "ratio"]
    tables = [table(head, lines), *([table(["run", "way", *PARTS, "the rest"], of_parts)] if of_parts else [])]
    return "\n\n".join(tables)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__, rounds=8)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:4], choices=WAYS, help="beside the ordinary run")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--parts", action="store_true", help="also time the parts of our steps")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(given)
    machine = hardware(DEVICE, options.threads)
    print(machine, flush=True)
    every: list[dict[str, Any]] = []
    for name in options.runs:
        ways = dict.fromkeys(["ordinary", *options.ways])
        jobs = [Job(name, way, options.threads, options.parts and way.startswith("ours")) for way in ways]
        rows = measure(jobs, warmup=2, rounds=options.rounds, work=work)
        print("\n" + shown(rows), flush=True)
        every += rows
        write_json(options.json, {"machine": machine, "rows": every})


if __name__ == "__main__":
    main()
