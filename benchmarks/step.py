"""Time and peak memory of one training step, by model, number type and way, against the ordinary step.

Every way, memory format and size has its own process, so that its peak memory can be measured. The processes take steps
in turn, one at a time, so that a machine that becomes slower is slower for all of them. A way's figures are those of
its faster memory format; its ratio is its median time over the median time of the ordinary step in that step's faster
format. With several sizes, a linear cost shows as the same time for an image. Run ``python benchmarks/step.py --help``.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measuring import arguments, hardware, memory_mib, positive, table, write_json

FORMATS = ("contiguous", "channels_last")
# Their networks are in flax_steps.py.
JAX_WAYS = ("jax ordinary", "jax_privacy", "jax_privacy, 8 at once")
JAX_MODELS = ("wrn16-4", "wrn28-10")


class Job(NamedTuple):
    """What one process measures: ``pieces`` physical batches of ``batch_size`` images in a step of a Trainer."""

    model: str
    dtype: str
    way: str
    memory_format: str
    batch_size: int
    device: str
    threads: int
    through: str
    pieces: int = 1


class Answers:
    """Between the steps of a process: what a step took goes to the parent, which says when the next one begins."""

    def __init__(self, job: Job, parent: Connection) -> None:
        self._on_gpu, self._parent = job.device == "cuda", parent
        self._before = memory_mib("VmRSS")
        self._start: float | None = None

    def goes_on(self) -> bool:
        """Send seconds and peak memory in MiB of the step that has ended, if one has; wait to be asked for another."""
        if self._start is not None:
            peak = memory_mib("VmHWM") - self._before
            if self._on_gpu:
                import torch

                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() / 2**20
            self._parent.send((time.perf_counter() - self._start, peak))
        more: bool = self._parent.recv()
        self._start = time.perf_counter()
        return more


def work(job: Job, parent: Connection) -> None:
    """Take a step whenever the parent asks for one."""
    try:
        if job.way in JAX_WAYS:
            import flax_steps

            answers = Answers(job, parent)
            step = flax_steps.step(job.model, job.way, job.batch_size, job.threads)
            while answers.goes_on():
                step()
        else:
            _work_in_torch(job, parent)
    except Exception as error:  # the table shows what a way cannot do
        parent.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _work_in_torch(job: Job, parent: Connection) -> None:
    import torch
    import training_steps

    torch.set_num_threads(job.threads)
    # The default of torch differs between operations. The older of its two ways, for which torch.compile asks.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = job.dtype == "tf32"
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # of Opacus, about hooks and secure mode
        answers = Answers(job, parent)
        memory_format = getattr(torch, {"contiguous": "contiguous_format"}.get(job.memory_format, job.memory_format))
        count = job.batch_size * job.pieces
        model, images, labels = training_steps.build(job.model, torch.device(job.device), count, memory_format)
        if job.through == "callback":
            answers.goes_on()  # the first step, in which the Trainer starts too
            options = {"pieces": job.pieces, "bf16": job.dtype == "bf16"}
            training_steps.through_a_trainer(job.way, model, images, labels, answers.goes_on, **options)
            return
        make = {**training_steps.WAYS, **training_steps.FINE_TUNING}[job.way]
        step = make(model, training_steps.autocast_to(job.device, job.dtype))
        while answers.goes_on():
            step(images, labels)


def jobs_of(options: argparse.Namespace, model: str, dtype: str, sizes: Sequence[int], device: str) -> list[Job]:
    """What is measured side by side: each way that the model has, in each memory format that the way can take."""
    jobs = []
    for size, pieces in product(sizes, options.pieces):
        for way in ["ordinary", *(way for way in options.ways if way != "ordinary")]:
            if way in JAX_WAYS:
                formats = ["channels_last"] if model in JAX_MODELS and dtype == "fp32" else []  # Flax has no other
            elif way.startswith("Opacus"):
                # The gradients of convolutions that Opacus computes are wrong on other images: docs/performance.md.
                formats = ["contiguous"]
            else:
                formats = options.formats
            shared = size, device, options.threads, options.through, pieces
            jobs += [Job(model, dtype, way, memory_format, *shared) for memory_format in formats]
    return jobs


def measure(jobs: list[Job], *, warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Take steps in turn; a row per job with ``seconds`` (median), ``peak_mib``, or ``error``."""
    context = multiprocessing.get_context("spawn")
    running = []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append(({**job._asdict(), "times": []}, ours, process))
    for turn in range(warmup + rounds):
        for row, pipe, _ in running:
            if "error" in row:
                continue
            try:
                pipe.send(True)
                answer = pipe.recv()
            except (EOFError, BrokenPipeError):
                answer = "the process died; it may have run out of memory"
            if isinstance(answer, str):
                row["error"] = answer
                continue
            if turn >= warmup:
                row["times"].append(answer[0])
            row["peak_mib"] = round(answer[1])
    for row, pipe, process in running:
        if "error" not in row:
            row["seconds"] = statistics.median(row["times"])
            pipe.send(False)
        process.join()
    return [row for row, _, _ in running]


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faster memory format of each way and size, with its ratios to the ordinary step's faster format."""
    best: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["batch_size"], row["pieces"], row["way"]
        if key not in best or row.get("seconds", float("inf")) < best[key].get("seconds", float("inf")):
            best[key] = row
    for (size, pieces, _), row in best.items():
        ordinary = best[size, pieces, "ordinary"]
        if "error" not in row and "error" not in ordinary:
            row["time_ratio"] = row["seconds"] / ordinary["seconds"]
            row["memory_ratio"] = row["peak_mib"] / ordinary["peak_mib"]
    return list(best.values())


def shown(rows: list[dict[str, Any]]) -> str:
    """The table of these rows; with several sizes it has the time for an image too."""
    each = len({(row["batch_size"], row["pieces"]) for row in rows}) > 1
    head = ["model", "type", "batch", "way", "format", "ms", "time ratio", "MiB", "memory ratio"]
    lines = []
    for row in rows:
        size = f"{row['pieces']} x {row['batch_size']}" if row["pieces"] > 1 else row["batch_size"]
        line = [row["model"], row["dtype"], size, row["way"]]
        if "error" in row:
            line += ["", row["error"], "", "", "", *[""] * each]
        else:
            line += [row["memory_format"].replace("_", "-"), f"{row['seconds'] * 1e3:.0f}"]
            ratios = (f"{row[name]:.2f}" if name in row else "" for name in ("time_ratio", "memory_ratio"))
            line += [next(ratios), row["peak_mib"], next(ratios)]
            if each:
                line.append(f"{row['seconds'] * 1e3 / row['batch_size'] / row['pieces']:.2f}")
        lines.append(line)
    return table([*head, *["ms for an image"] * each], lines)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    import torch
    import training_steps

    parser = arguments(__doc__, rounds=7)
    parser.add_argument(
        "--models", nargs="+", default=list(training_steps.DEFAULT_MODELS), choices=training_steps.MODELS
    )
    types = "float32, float32 with products in TF32 on a GPU, bfloat16 by autocast"
    parser.add_argument("--types", nargs="+", default=["fp32", "bf16"], choices=["fp32", "tf32", "bf16"], help=types)
    ways = list(dict.fromkeys([*training_steps.WAYS, *training_steps.FINE_TUNING, *training_steps.PRIVACY, *JAX_WAYS]))
    parser.add_argument("--ways", nargs="+", default=list(training_steps.WAYS), choices=ways)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    sizes = "sizes of physical batches (default: one, by model and device)"
    parser.add_argument("--batch-size", nargs="+", type=positive, help=sizes)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that count (default 2)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    through = "what takes the steps: this benchmark, or a Lightning Trainer, for our ways with PrivacyCallback"
    parser.add_argument("--through", default="step", choices=["step", "callback"], help=f"{through} (default step)")
    pieces = "physical batches of a logical step, with --through callback (default 1)"
    parser.add_argument("--pieces", nargs="+", type=positive, default=[1], help=pieces)
    options = parser.parse_args(given)
    if options.pieces != [1] if options.through == "step" else set(options.ways) - set(training_steps.PRIVACY):
        parser.error(f"--pieces is for --through callback, which takes --ways of {', '.join(training_steps.PRIVACY)}")
    return options


def main() -> None:
    """Measure and print."""
    import torch
    import training_steps

    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = hardware(device, options.threads)
    print(machine, flush=True)
    every: list[dict[str, Any]] = []
    for model, dtype in product(options.models, options.types):
        sizes = options.batch_size or [training_steps.MODELS[model][2][device]]
        rows = measure(jobs_of(options, model, dtype, sizes, device), warmup=options.warmup, rounds=options.rounds)
        every += rows
        print("\n" + shown(summarize(rows)), flush=True)
        write_json(options.json, {"machine": machine, "rows": every})


if __name__ == "__main__":
    main()
