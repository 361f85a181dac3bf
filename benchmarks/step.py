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
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measuring import arguments, hardware, memory_mib, positive, table, write_json

FORMATS = ("contiguous", "channels_last")


class Job(NamedTuple):
    """What one process measures."""

    model: str
    dtype: str
    way: str
    memory_format: str
    batch_size: int
    device: str
    threads: int


class Answers:
    """Between the turns of a process: what a turn took goes to the parent, which says when the next one begins.

    Args:
        device: ``cuda`` or ``cpu``.
        parent: The connection to the parent.

    Attributes:
        parts: Seconds of the parts of a turn; each turn starts from zero.
    """

    def __init__(self, device: str, parent: Connection) -> None:
        self._on_gpu, self._parent, self.parts = device == "cuda", parent, Counter[str]()
        self._before = memory_mib("VmRSS")
        self._start: float | None = None

    def goes_on(self) -> bool:
        """Send what the turn that has ended took, or that the first one may begin; wait to be asked for the next."""
        self._parent.send(self._took())
        more: bool = self._parent.recv()
        self.parts.clear()
        self._start = time.perf_counter()
        return more

    def _took(self) -> tuple[float, float, dict[str, float]] | None:
        """Seconds of the turn, peak memory in MiB so far, and seconds of the turn's parts; None before a turn."""
        if self._start is None:
            return None
        if not self._on_gpu:
            seconds, peak = time.perf_counter() - self._start, memory_mib("VmHWM") - self._before
        else:
            import torch

            torch.cuda.synchronize()
            seconds, peak = time.perf_counter() - self._start, torch.cuda.max_memory_allocated() / 2**20
        return seconds, peak, dict(self.parts)


def work(job: Job, parent: Connection) -> None:
    """Take a step whenever the parent asks for one."""
    import torch
    import training_steps

    torch.set_num_threads(job.threads)
    # The default of torch differs between operations. The older of its two ways, for which torch.compile asks.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = job.dtype == "tf32"
    torch.manual_seed(0)
    answers = Answers(job.device, parent)
    memory_format = getattr(torch, {"contiguous": "contiguous_format"}.get(job.memory_format, job.memory_format))
    model, *batch = training_steps.build(job.model, torch.device(job.device), job.batch_size, memory_format)
    step = training_steps.WAYS[job.way](model, training_steps.autocast_to(job.device, job.dtype))
    while answers.goes_on():
        step(*batch)


def _guarded(work: Callable[[Any, Connection], None], job: Any, parent: Connection) -> None:
    """Call ``work`` without its warnings, and tell the parent what fails."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of Opacus, about hooks and secure mode
            work(job, parent)
    except Exception as error:  # the table shows what a way cannot do
        parent.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def jobs_of(options: argparse.Namespace, model: str, dtype: str, sizes: Sequence[int], device: str) -> list[Job]:
    """What is measured side by side: each way that the model has, in each memory format that the way can take."""
    jobs = []
    for size in sizes:
        for way in ["ordinary", *(way for way in options.ways if way != "ordinary")]:
            # The gradients of convolutions that Opacus computes are wrong on other images: docs/performance.md.
            formats = ["contiguous"] if way.startswith("Opacus") else options.formats
            jobs += [Job(model, dtype, way, each, size, device, options.threads) for each in formats]
    return jobs


def measure(
    jobs: Sequence[Any], *, warmup: int, rounds: int, work: Callable[[Any, Connection], None] = work
) -> list[dict[str, Any]]:
    """Take turns, of one step each unless ``work`` takes more.

    Args:
        jobs: Named tuples, one for each process.
        warmup: Turns that do not count.
        rounds: Turns that count.
        work: What the process of a job does, by an `Answers`.

    Returns:
        A row for each job: ``first`` are the seconds of its first turn, ``times`` and ``parts`` those of the turns that
        count, ``seconds`` their median, and ``peak_mib`` is its memory; or ``error``.
    """
    context = multiprocessing.get_context("spawn")
    running = []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=_guarded, args=(work, job, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append(({**job._asdict(), "times": [], "parts": []}, ours, process))
    for turn in range(-1, warmup + rounds):
        for row, pipe, _ in running:
            if "error" in row:
                continue
            try:
                if turn >= 0:  # before, it is waited for until all processes are ready
                    pipe.send(True)
                answer = pipe.recv()
            except (EOFError, BrokenPipeError):
                answer = "the process died; it may have run out of memory"
            if isinstance(answer, str):
                row["error"] = answer
            elif answer is not None:
                seconds, peak, parts = answer
                row.setdefault("first", seconds)
                row["peak_mib"] = round(peak)
                if turn >= warmup:
                    row["times"].append(seconds)
                    row["parts"].append(parts)
    for row, pipe, process in running:
        if "error" not in row:
            row["seconds"] = statistics.median(row["times"])
            pipe.send(False)
        process.join()
    return [row for row, _, _ in running]


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faster memory format of each way and size, with its ratios to the ordinary step's faster format."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["batch_size"], row["way"]
        if key not in best or row.get("seconds", float("inf")) < best[key].get("seconds", float("inf")):
            best[key] = row
    for (size, _), row in best.items():
        ordinary = best[size, "ordinary"]
        if "error" not in row and "error" not in ordinary:
            row["time_ratio"] = row["seconds"] / ordinary["seconds"]
            row["memory_ratio"] = row["peak_mib"] / ordinary["peak_mib"]
    return list(best.values())


def shown(rows: list[dict[str, Any]]) -> str:
    """The table of these rows; with several sizes it has the time for an image too."""
    each = len({row["batch_size"] for row in rows}) > 1
    head = ["model", "type", "batch", "way", "format", "ms", "time ratio", "MiB", "memory ratio"]
    lines = []
    for row in rows:
        line = [row["model"], row["dtype"], row["batch_size"], row["way"]]
        if "error" in row:
            line += ["", row["error"], "", "", "", *[""] * each]
        else:
            line += [row["memory_format"].replace("_", "-"), f"{row['seconds'] * 1e3:.0f}"]
            ratios = (f"{row[name]:.2f}" if name in row else "" for name in ("time_ratio", "memory_ratio"))
            line += [next(ratios), row["peak_mib"], next(ratios)]
            if each:
                line.append(f"{row['seconds'] * 1e3 / row['batch_size']:.2f}")
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
    parser.add_argument("--ways", nargs="+", default=list(training_steps.WAYS), choices=training_steps.WAYS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    sizes = "sizes of physical batches (default: one, by model and device)"
    parser.add_argument("--batch-size", nargs="+", type=positive, help=sizes)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that count (default 2)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    return parser.parse_args(given)


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
