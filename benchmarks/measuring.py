"""What the benchmarks share: the machine in a line, times, memory, tables, and the options of a command line."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def arguments(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser whose help is a benchmark's docstring.

    Args:
        description: The docstring.
        rounds: Default of ``--rounds``; None if the benchmark has neither rounds nor ``--json``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds, help=f"rounds that count (default {rounds})")
        parser.add_argument("--json", type=Path, help="also write every time to this file")
    return parser


def positive(text: str) -> int:
    """A count from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def hardware(device: str | None = None, threads: int | None = None) -> str:
    """The machine, torch's version and today's date in a line.

    Args:
        device: ``cuda`` or ``cpu``; the GPU if there is one by default.
        threads: Threads of the CPU; torch's own number by default.
    """
    import torch

    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
        threads = threads or torch.get_num_threads()
        name = f"{cpu}, {threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, torch {torch.__version__}, {date.today()}"


def memory_mib(key: str) -> float:
    """Memory of this process: ``VmRSS`` is what it has now, ``VmHWM`` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def seconds_of(work: Callable[[], object], device: Any) -> float:
    """How long a call takes, until the torch device has done all of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of the times of each name."""
    return {name: statistics.median(values) for name, values in times.items()}


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_json(path: Path | None, content: Any) -> None:
    """Write the file that ``--json`` names, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1))
