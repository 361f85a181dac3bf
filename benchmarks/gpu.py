"""Everything that a machine with a GPU has to tell, in one command, written to ``docs/performance_gpu.md``.

The parts, which are in ``gpu.yaml``, run one after the other, each in its own process and under a limit of its own.
``runs/gpu`` has what a visit leaves to the next one, on another machine too: a part that has ended is not run again
while the folder is there, and the runs of the paper's row resume from their newest checkpoints. ``--rehearse`` makes
two visits with small parts on the CPU, of which the first one stops these runs.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import yaml
from measuring import ROOT, arguments, hardware, table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dp_lightning.experiments.runs import RunFolder

_NO_ROW = "The row of the paper needs CIFAR-10 in a file of `benchmarks/cifar_npz.py`: `make gpu DATA=cifar10.npz`.\n"
# Seconds in which a part that is stopped may save what it has, and those that are worth the start of a part.
_GRACE, _LEAST = 15, 30


def parts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is run, as in ``gpu.yaml``, with the command of this visit and the folders of the runs."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    for part in found:
        run = part["run"] = options.folder / part["run"] if "run" in part else None
        command = part["rehearsal" if options.rehearse else "command"]
        part["command"] = command.format(data=options.data, run=run, root=run and RunFolder(run).root)
    return [part for part in found if options.data or part["run"] is None]


def output_of(command: Sequence[str], limit: float, enough: Callable[[], bool] = bool) -> tuple[str, int | None]:
    """What a command prints, and its exit status; None where it was stopped, with all that it had started."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as printed:
        into = {"stdout": printed, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **into)
        end = time.monotonic() + limit
        try:
            while (code := process.poll()) is None and time.monotonic() < end and not enough():
                time.sleep(0.1)
            if code is None:
                process.terminate()  # a run saves a checkpoint
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the next part has the machine for itself
            process.wait()
        printed.seek(0)
        return printed.read(), code


def steps_of(run: Path) -> int:
    """Number of steps in the journals of a run."""
    return max((path.read_bytes().count(b"\n") for path in run.rglob("privacy_journal_*.jsonl")), default=0)


def seconds_of_step(run: Path) -> float:
    """The median from one logged loss, which waits for the device, to the next; NaN where there are no two."""
    times = []
    for path in run.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.endswith("train_loss")]
        for before, after in pairwise(event for tag in tags for event in events.Scalars(tag)):
            times.append((after.wall_time - before.wall_time) / (after.step - before.step))
    return statistics.median(times or [math.nan])


def row_of_the_paper(runs: Sequence[Path]) -> str:
    """How far DP-SGD and DP-Muon have come, and what orthogonalization adds to a step."""
    lines, seconds = [], [seconds_of_step(run) for run in runs]
    for run, step in zip(runs, seconds, strict=True):
        result = RunFolder(run).result or {}
        names = ("test_accuracy_last", "test_accuracy_best", "epsilon", "seconds")
        numbers = [*(result.get(name) or math.nan for name in names), 1 / step]
        lines.append([run.name, steps_of(run), *(f"{number:.4g}" for number in numbers)])
    head = ["", "steps of 610", "accuracy, last", "best", "epsilon", "seconds", "steps per second"]
    more = 100 * (seconds[1] / seconds[0] - 1)
    return (
        "WRN-16-4 on CIFAR-10, B = 4,096, epsilon = 4, bfloat16; another visit resumes a run that lacks steps. In the\n"
        f"paper the best accuracies are 0.393 and 0.487.\n\n{table(head, lines)}\n\nA step of DP-Muon takes "
        f"{more:.2f} % more than one of DP-SGD (medians). In the paper an epoch takes 2.92 % more.\n"
    )


def section(part: dict[str, Any], limit: float, enough: Callable[[], bool]) -> tuple[str, bool]:
    """Run a part; returns its section of the page in Markdown, and whether the part has ended without an error."""
    start, command = time.monotonic(), part["command"]
    printed, code = output_of([sys.executable, *shlex.split(command)], limit, enough)
    lines, how = printed.splitlines(), f"Failed with exit status {code} after" if code else "Ended after"
    tables = "\n".join(line for line in lines if line.startswith("|") or not line).strip("\n")
    # The last line of pytest has the number of tests.
    shown = lines[-1].strip("= ") if lines and "pytest" in command else tables
    blocks = [f"## {part['title']}", f"```bash\npython {command.replace(f'{ROOT}/', '')}\n```", shown]
    blocks.append(f"{'Stopped after' if code is None else how} {time.monotonic() - start:.0f} s.")
    if code:
        blocks.append("\n".join(["```text", *lines[-12:], "```"]))
    return "\n\n".join(filter(None, blocks)), code == 0


def visit(options: argparse.Namespace, steps: float = math.inf) -> list[str]:
    """Run what has not ended before, or up to so many steps of each run of the row; returns what has not ended yet."""
    end, kept = time.monotonic() + 60 * options.limit, options.folder / "sections.json"
    sections: dict[str, tuple[str, bool]] = json.loads(kept.read_text()) if kept.is_file() else {}
    page = f"# Speed on a GPU{', rehearsed by small parts on a CPU' * options.rehearse}\n\n{hardware()}. Written by\n"
    page += "`make gpu`. The ratios are those to the ordinary step, as in [Speed and memory](performance.md).\n\n"
    planned = [part for part in parts(options) if part["run"] or steps == math.inf]
    runs = [part["run"] for part in planned if part["run"]]
    for part in planned:
        title, run, minutes = part["title"], part["run"], part["minutes"] * max(options.limit / 10, 1)
        limit = min(60 * minutes, end - time.monotonic() - _GRACE)
        if limit < _LEAST or (title in sections and sections[title][1]):
            continue
        print(title, flush=True)
        sections[title] = section(part, limit, lambda run=run: run is not None and steps_of(run) >= steps)
        for older in sorted(run.rglob("*.ckpt"), key=os.path.getmtime)[:-1] if run else ():
            older.unlink()  # a small folder travels to another machine
        # The page is written after each part, so that an interruption loses nothing.
        kept.write_text(json.dumps(sections))
        row = row_of_the_paper(runs) if runs else _NO_ROW
        options.page.write_text(page + row + "".join(f"\n{text}\n" for text, _ in sections.values()))
    return [part["title"] for part in planned if part["title"] not in sections or not sections[part["title"]][1]]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, help="the page to write (default docs/performance_gpu.md)")
    parser.add_argument("--limit", type=float, default=10, help="minutes of a visit (default 10)")
    parser.add_argument("--data", type=Path, help="CIFAR-10 in one file, as cifar_npz.py --download writes it")
    parser.add_argument("--rehearse", action="store_true", help="make two visits with small parts on the CPU")
    options = parser.parse_args(given)
    home = Path(tempfile.mkdtemp()) if options.rehearse else ROOT
    options.folder, options.page = home / "runs" / "gpu", options.page or home / "docs" / "performance_gpu.md"
    for folder in (options.folder, options.page.parent):
        folder.mkdir(parents=True, exist_ok=True)
    options.data = options.data and options.data.resolve()
    if options.rehearse and options.data is None:
        options.data = home / "images.npz"
        x, y = np.random.default_rng(0).integers(0, 255, (740, 16, 16, 3), np.uint8), np.arange(740) % 10
        np.savez(options.data, train_images=x[100:], train_labels=y[100:], test_images=x[:100], test_labels=y[:100])
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Make a visit, or the two of a rehearsal."""
    import torch

    options = parse(given)
    if options.rehearse:
        visit(options, steps=6)
    elif not torch.cuda.is_available():
        sys.exit("There is no GPU here that torch can use.")
    print(options.page, flush=True)
    if left := visit(options):
        sys.exit(f"Not all parts ended: {', '.join(left)}.")


if __name__ == "__main__":
    main()
