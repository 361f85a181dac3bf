"""Everything that a machine with a GPU has to tell, in one command, written to ``docs/performance_gpu.md``.

The parts run one after the other, each in its own process and under a limit of its own: the tests that need a GPU, the
step table, an epoch with and without orthogonalization, noise, post-processing, and several ranks. Together they may
take longer than ``--limit``: what matters most comes first, and the same command goes on with what is left. A part that
has ended on this machine is not run again; ``--again`` forgets them. Run ``python benchmarks/gpu.py --help``.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from dp_lightning.atomic_files import replacing
from dp_lightning.commands.doctor import missing

HERE = Path(__file__).parent
ROOT = HERE.parent
TYPES, SIZES = ("fp32", "tf32", "bf16"), (64, 256, 1024)
OURS = ("ours flat", "ours per-layer")
OPACUS = ("Opacus hooks", "Opacus functorch", "Opacus ghost")

# Lines of what a part that failed has printed.
_LAST = 12

CARRIED = """It runs in a checkout of the source; the Docker image has no benchmarks. The tables of a step have the
columns of [Speed and memory of a step](performance.md).

A machine that has torch and cannot download anything needs no installation: `doctor` names the packages that are
missing, which are carried there as wheels (`pip download --no-deps -d wheels opacus jsonargparse`, and so on). When
these are installed, it names what they need.

```bash
python -m dp_lightning doctor
python -m pip install --no-index --no-deps wheels/*.whl
python benchmarks/gpu.py
```"""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: of its files.
        title: on the page.
        command: after the interpreter.
        minutes: it is stopped after so many.
        shows: the page's text, from what it printed.
    """

    name: str
    title: str
    command: tuple[str, ...]
    minutes: float
    shows: Callable[[str], str] = lambda printed: printed


def tables(printed: str) -> str:
    """The tables, without what stands before and between them."""
    return "\n".join(line for line in printed.splitlines() if line.startswith("|") or not line).strip("\n")


def last_line(printed: str) -> str:
    """How many tests passed."""
    lines = [line for line in printed.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""


def of_benchmark(name: str, *arguments: object) -> tuple[str, ...]:
    """The command of a benchmark of this folder."""
    return (str(HERE / f"{name}.py"), *map(str, arguments))


def parts(options: argparse.Namespace) -> list[Part]:
    """What is run, in this order: what matters most comes first."""
    small = options.rehearse
    model, sizes, types, opacus = (
        ("small-cnn", (4,), TYPES[:1], OPACUS[:1]) if small else ("wrn16-4", SIZES, TYPES, OPACUS)
    )
    rounds = ("--formats", "contiguous", "--warmup", 1, "--rounds", 1 if small else 7)

    def steps(name: str, title: str, network: str, size: int, *ways: str, types: Sequence[str] = types) -> Part:
        chosen = ("--models", network, "--types", *types, "--batch-size", size, "--ways", *ways)
        return Part(name, title, of_benchmark("step", *chosen, *rounds), 4, tables)

    def epoch(network: str) -> Part:
        out = options.out / f"epoch_{network}"
        more = ("--rehearse", "--turns", 1) if small else ()
        command = of_benchmark("epochs", "--model", network, "--out", out, *more)
        return Part(f"epoch_{network}", f"An epoch of {network}", command, 8, tables)

    tests = "tests/privacy/test_chacha.py" if small else "tests"
    found = [Part("tests", "Tests that need a GPU", ("-m", "pytest", "-n", "0", "-m", "gpu", tests), 8, last_line)]
    found += [
        steps(f"step_{size}", f"One step of {model}, {size} images", model, size, *OURS, *opacus) for size in sizes
    ]
    found.append(epoch("wrn16-4"))
    found.append(Part("noise", "Noise", of_benchmark("noise", *(("--millions", 0.1) if small else ())), 2, tables))
    if not small:
        found += [
            steps(f"step_{n}", f"One step of {n}", n, size, *OURS) for n, size in (("wrn28-10", 256), ("vit-s16", 64))
        ]
    chains = of_benchmark("postprocess", "--model", model, "--rounds", 1 if small else 7)
    ranks = of_benchmark("ranks", "--model", model, "--rounds", 1 if small else 5, "--one-device")
    found += [
        Part("postprocess", "Post-processing of a logical step", chains, 3, tables),
        steps("one_by_one", "Together and one by one", model, sizes[0], OURS[0], "ours, one by one", types=TYPES[:1]),
        Part("ranks", "Two ranks on one device", ranks, 3, tables),
    ]
    return [*found, *([] if small else [epoch("wrn28-10")])]


def earlier(part: Part, machine: str, out: Path) -> dict[str, Any] | None:
    """What the same command has said before on the same machine, on any day."""
    try:
        found = json.loads((out / f"{part.name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(found, dict):  # it is of another program
        return None
    without_date = str(found.get("machine")).rpartition(",")[0]
    same = without_date == machine.rpartition(",")[0] and found.get("command") == list(part.command)
    return found if same else None


def run(part: Part, machine: str, out: Path, *, left: float) -> dict[str, Any]:
    """Run a part, or read what it said before."""
    if (before := earlier(part, machine, out)) is not None and before["state"] == "ended":
        return before
    limit = min(60 * part.minutes, left)
    if limit < 20:
        return {"state": "was not run: no time was left", "printed": ""}
    start = time.monotonic()
    print(f"{part.title}: at most {limit:.0f} s", flush=True)
    printed, code = output_of([sys.executable, *part.command], limit)
    state = "ended" if code == 0 else f"failed with exit status {code}"
    if code is None:
        state = f"was stopped after {limit:.0f} s"
    seconds = round(time.monotonic() - start, 1)
    result = {"state": state, "seconds": seconds, "printed": printed, "machine": machine, "command": list(part.command)}
    write(out / f"{part.name}.json", json.dumps(result, indent=1))
    print(f"  {state}, {seconds:.0f} s", flush=True)
    return result


def write(path: Path, text: str) -> None:
    """The whole file or, where the process is killed, the one before."""
    with replacing(path) as file:
        file.write(text.encode())


def output_of(command: Sequence[str], limit: float) -> tuple[str, int | None]:
    """What a command prints, and its exit status; None where it was stopped, with all that it had started."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the next part has the machine for itself
            process.wait()
        printed.seek(0)
        return printed.read(), code


def page(machine: str, results: dict[str, tuple[Part, dict[str, Any]]], *, rehearsal: bool = False) -> str:
    """Markdown."""
    small = " This is a rehearsal, with a small network and few images." if rehearsal else ""
    lines = [
        "# Speed on a GPU",
        "",
        f"{machine}. Written by `make gpu`, which goes on where it was interrupted.{small}",
        "",
        CARRIED,
        "",
    ]
    for part, result in results.values():
        command = " ".join(_relative(word) for word in part.command)
        ended, failed = result["state"] == "ended", result["state"].startswith("failed")
        state = "" if ended else f"This part {result['state']}."
        when = f"{result['machine'].rpartition(', ')[2]}, {result['seconds']:.0f} s." if "seconds" in result else ""
        last = "\n".join(result["printed"].splitlines()[-_LAST:])
        shown = (state, part.shows(result["printed"]), f"```text\n{last}\n```" if failed else "", when)
        lines += [
            f"## {part.title}",
            "",
            f"```bash\npython {command}\n```",
            "",
            *(f"{text}\n" for text in shown if text),
        ]
    return "\n".join(lines)


def _relative(word: str) -> str:
    word = word.replace(f"{ROOT}{os.sep}", "")
    return f'"{word}"' if " " in word or "," in word else word


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for what each part prints (runs/gpu, or runs/gpu_rehearsal)")
    parser.add_argument("--page", type=Path, help="the page to write (docs/performance_gpu.md, or a file in --out)")
    parser.add_argument("--limit", type=float, default=40, help="minutes for all parts together (default 40)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts, by the names of their files")
    parser.add_argument("--again", action="store_true", help="run also the parts that have ended before")
    parser.add_argument("--plan", action="store_true", help="write the page with the commands alone, and run nothing")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a small network and sizes")
    options = parser.parse_args(arguments)
    # A rehearsal's figures are never taken for those of a GPU.
    options.out = options.out or ROOT / "runs" / ("gpu_rehearsal" if options.rehearse else "gpu")
    options.out = options.out.resolve()
    options.page = options.page or (
        options.out / "page.md" if options.rehearse else ROOT / "docs" / "performance_gpu.md"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left, and write the page."""
    import torch
    from step import hardware

    options = parse(arguments)
    all_parts = parts(options)
    names = [part.name for part in all_parts]
    if unknown := sorted(set(options.only or ()) - set(names)):
        sys.exit(f"There is no part {', '.join(unknown)}. The parts are {', '.join(names)}.")
    not_run: dict[str, Any] = {"state": "was not run yet", "printed": ""}
    try:
        for folder in (options.out, options.page.parent):
            folder.mkdir(parents=True, exist_ok=True)
        before = options.page.read_text() if options.page.exists() else ""
    except OSError as error:
        sys.exit(f"--out and --page: {error}")
    if options.plan:
        if before and "\nNo GPU. " not in before:
            sys.exit(f"{options.page} has figures. Give another --page for the commands alone.")
        write(options.page, page("No GPU", {part.name: (part, not_run) for part in all_parts}))
        return
    if not torch.cuda.is_available() and not options.rehearse:
        sys.exit("There is no GPU here that torch can use. Rehearse on the CPU: add --rehearse")
    if absent := missing():
        print(f"Not installed: {', '.join(absent)}. Parts that need them fail.", flush=True)
    chosen = [part for part in all_parts if not options.only or part.name in options.only]
    if options.again:
        for part in chosen:
            (options.out / f"{part.name}.json").unlink(missing_ok=True)
            shutil.rmtree(options.out / part.name, ignore_errors=True)
    end = time.monotonic() + 60 * options.limit
    machine = hardware("cuda" if torch.cuda.is_available() else "cpu", torch.get_num_threads())
    results = {part.name: (part, earlier(part, machine, options.out) or not_run) for part in all_parts}
    for part in chosen:
        results[part.name] = part, run(part, machine, options.out, left=end - time.monotonic())
        # After each part, so that an interruption loses nothing.
        write(options.page, page(machine, results, rehearsal=options.rehearse))
    print(f"\n{options.page}")
    failed = [part.name for part in chosen if results[part.name][1]["state"] != "ended"]
    if failed:
        sys.exit(f"Not all parts ended: {', '.join(failed)}. What they printed is in {options.out}.")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # With a scheduler's limit and a closed terminal too the running part ends, unless nohup was asked for.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on with the part that was running.")
