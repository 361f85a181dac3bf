"""Time and peak memory of one training step, by model, number type and way, against the ordinary step.

Every way and memory format has its own process, so that its peak memory can be measured. The processes take steps in
turn, one at a time, so that a machine that becomes slower is slower for all of them. A way's figures are those of its
faster memory format; its ratio is its median time over the median time of the ordinary step in that step's faster
format. Run ``python benchmarks/step.py --help``.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

FORMATS = ("contiguous", "channels_last")
# Their networks are in flax_steps.py.
JAX_WAYS = ("jax ordinary", "jax_privacy", "jax_privacy, 8 at once")
JAX_MODELS = ("wrn16-4", "wrn28-10")


class Job(NamedTuple):
    """What one process measures."""

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
    """Between the steps of a process: what they took goes to the parent, which says when the next one begins."""

    def __init__(self, job: Job, parent: Connection) -> None:
        self._on_gpu, self._parent = job.device == "cuda", parent
        self._before = resident_mib()
        self._start: float | None = None

    def goes_on(self) -> bool:
        """Send seconds and peak memory in MiB of the step that has ended, if one has; wait to be asked for another."""
        if self._start is not None:
            self._parent.send((self._seconds(), self._peak()))
        more: bool = self._parent.recv()
        self._start = time.perf_counter()
        return more

    def _seconds(self) -> float:
        assert self._start is not None
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter() - self._start

    def _peak(self) -> float:
        if self._on_gpu:
            import torch

            return torch.cuda.max_memory_allocated() / 2**20
        return peak_mib() - self._before


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
    import trainer_steps
    import training_steps

    torch.set_num_threads(job.threads)
    training_steps.use_tf32(job.dtype == "tf32")
    build, shape, _ = training_steps.MODELS[job.model]
    torch.manual_seed(0)
    with training_steps.quiet():
        answers = Answers(job, parent)
        memory_format = getattr(torch, f"{job.memory_format}_format", None) or getattr(torch, job.memory_format)
        model = build().to(job.device).to(memory_format=memory_format).train()
        count = job.batch_size * job.pieces
        images = torch.randn(count, *shape, device=job.device).to(memory_format=memory_format)
        labels = torch.randint(10, (count,), device=job.device)
        if job.through == "callback":
            answers.goes_on()  # the first step, in which the Trainer starts too
            bf16, pieces = job.dtype == "bf16", job.pieces
            trainer_steps.take_steps(job.way, model, images, labels, answers.goes_on, pieces=pieces, bf16=bf16)
            return
        make = {**training_steps.WAYS, **training_steps.FINE_TUNING}[job.way]
        step = make(model, training_steps.autocast_to(job.device, job.dtype))
        while answers.goes_on():
            step(images, labels)


def jobs_of(options: argparse.Namespace, model: str, dtype: str, size: int, device: str) -> list[Job]:
    """What is measured side by side: each way that the model has, in each memory format that the way can take."""
    ways = ["ordinary", *(way for way in options.ways if way != "ordinary")]
    jobs = []
    for way in ways:
        if way in JAX_WAYS:
            formats = ["channels_last"] if model in JAX_MODELS and dtype == "fp32" else []  # Flax has this one alone
        elif way.startswith("Opacus"):
            # Its gradients of convolutions are wrong on other images: see docs/performance.md.
            formats = ["contiguous"]
        else:
            formats = options.formats
        jobs += [
            Job(
                model,
                dtype,
                way,
                memory_format,
                size,
                device,
                options.threads,
                options.through,
                options.pieces,
            )
            for memory_format in formats
        ]
    return jobs


def resident_mib() -> float:
    """Memory of this process now."""
    return _status("VmRSS")


def peak_mib() -> float:
    """Peak memory of this process so far."""
    return _status("VmHWM")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def measure(jobs: list[Job], *, warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Take steps in turn; a row per job with ``seconds`` (median), ``peak_mib``, or ``error``."""
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    running = []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        row: dict[str, Any] = {**job._asdict(), "times": []}
        rows.append(row)
        running.append((row, ours, process))
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
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faster memory format of each way, with its ratios to the ordinary step's faster format."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        current = best.get(row["way"])
        if current is None or row.get("seconds", float("inf")) < current.get("seconds", float("inf")):
            best[row["way"]] = row
    ordinary = best["ordinary"]
    for row in best.values():
        if "error" not in row and "error" not in ordinary:
            row["time_ratio"] = row["seconds"] / ordinary["seconds"]
            row["memory_ratio"] = row["peak_mib"] / ordinary["peak_mib"]
    return list(best.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | type | batch | way | format | ms | time ratio | MiB | memory ratio |",
        "| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        head = f"| {row['model']} | {row['dtype']} | {row['batch_size']} | {row['way']} | "
        if "error" in row:
            lines.append(head + f"| {row['error']} | | | |")
        else:
            lines.append(
                head + f"{row['memory_format'].replace('_', '-')} | {row['seconds'] * 1e3:.0f} | "
                f"{row['time_ratio']:.2f} | {row['peak_mib']} | {row['memory_ratio']:.2f} |"
            )
    return "\n".join(lines)


def hardware(device: str, threads: int) -> str:
    """The machine in a line."""
    import torch

    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        cpu = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{cpu[0] if cpu else platform.processor()}, {threads} thread{'s' * (threads > 1)}, {capability}"
    return f"{name}, torch {torch.__version__}, {date.today()}"


def positive(text: str) -> int:
    """A count from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    import torch
    import trainer_steps
    import training_steps

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(training_steps.DEFAULT_MODELS), choices=training_steps.MODELS
    )
    parser.add_argument(
        "--types",
        nargs="+",
        default=["fp32", "bf16"],
        choices=training_steps.TYPES,
        help="float32, float32 with products in TF32 on a GPU, bfloat16 by autocast",
    )
    ways = [*training_steps.WAYS, *training_steps.FINE_TUNING, *JAX_WAYS]
    parser.add_argument("--ways", nargs="+", default=list(training_steps.WAYS), choices=ways)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--batch-size", type=positive, help="physical batch size (default: by model and device)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that count (default 2)")
    parser.add_argument("--rounds", type=positive, default=7, help="steps that count (default 7)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument(
        "--through",
        default="step",
        choices=["step", "callback"],
        help="what takes the steps: this benchmark, or a Lightning Trainer, for our ways with PrivacyCallback "
        "(default step)",
    )
    parser.add_argument(
        "--pieces",
        type=positive,
        default=1,
        help="physical batches of a logical step, with --through callback (default 1)",
    )
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    options = parser.parse_args(arguments)
    if options.through == "callback" and (others := sorted(set(options.ways) - set(trainer_steps.WAYS))):
        parser.error(f"--through callback takes no {', '.join(others)}: set --ways to {', '.join(trainer_steps.WAYS)}")
    if options.through == "step" and options.pieces > 1:
        parser.error("--pieces is for --through callback: without it, a step is one physical batch")
    return options


def main() -> None:
    """Measure and print."""
    import torch
    import training_steps

    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    machine = hardware(device, options.threads)
    print(machine, flush=True)
    every: list[dict[str, Any]] = []
    for model in options.models:
        for dtype in options.types:
            size = options.batch_size or training_steps.MODELS[model][2][device]
            rows = measure(jobs_of(options, model, dtype, size, device), warmup=options.warmup, rounds=options.rounds)
            every += rows
            print("\n" + table(summarize(rows)), flush=True)
            if options.json:
                options.json.write_text(json.dumps({"machine": machine, "rows": every}, indent=1))


if __name__ == "__main__":
    main()
