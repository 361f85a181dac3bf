"""Everything that a machine with a GPU has to tell, in one command, written to ``docs/performance_gpu.md``.

The parts run one after the other, each in its own process and under a limit of its own: the tests that need a GPU, the
step table, noise and post-processing, and several ranks. Together they may take longer than ``--limit``: what matters
most comes first, and the same command resumes with what is left. A part that has ended on this machine is not run again
while its file is in ``--out``. Run ``python benchmarks/gpu.py --help``.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measuring import ROOT, arguments, hardware

OURS = ("ours flat", "ours per-layer")
OPACUS = ("Opacus hooks", "Opacus functorch", "Opacus ghost")

# Lines that the page shows of what a part that failed has printed.
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


class Part(NamedTuple):
    """One process."""

    name: str
    """Name of the part's files in ``--out``."""
    title: str
    command: tuple[str, ...]
    """What stands after the interpreter."""
    minutes: float
    """The part is stopped after so many minutes."""

    def shown(self, printed: str) -> str:
        """What the page shows of what the part has printed: its tables, or the line with the number of tests."""
        lines = printed.splitlines()
        if self.name == "tests":
            return next((line.strip("= ") for line in reversed(lines) if line.strip()), "")
        return "\n".join(line for line in lines if line.startswith("|") or not line).strip("\n")


def parts(options: argparse.Namespace) -> list[Part]:
    """What is run, in this order: what matters most comes first."""
    small = options.rehearse
    model, sizes, types, opacus = "wrn16-4", (64, 256, 1024), ("fp32", "tf32", "bf16"), OPACUS
    if small:
        model, sizes, types, opacus = "small-cnn", (4,), types[:1], OPACUS[:1]

    def part(title: str, minutes: float, name: str, *words: object, key: str = "") -> Part:
        return Part(key or name, title, (str(Path(__file__).with_name(f"{name}.py")), *map(str, words)), minutes)

    def steps(key: str, title: str, network: str, size: int, *ways: str, types: Sequence[str] = types) -> Part:
        chosen = ("--models", network, "--types", *types, "--batch-size", size, "--ways", *ways)
        rounds = ("--formats", "contiguous", "--warmup", 1, "--rounds", 1 if small else 7)
        return part(title, 4, "step", *chosen, *rounds, key=key)

    tests = ("-m", "pytest", "-n", "0", "-m", "gpu", "tests/privacy/test_chacha.py" if small else "tests")
    rounds = ("--model", model, "--rounds", 1 if small else 7)
    larger = () if small else (("wrn28-10", 256), ("vit-s16", 64))
    return [
        Part("tests", "Tests that need a GPU", tests, 8),
        *(steps(f"step_{n}", f"One step of {model}, {n} images", model, n, *OURS, *opacus) for n in sizes),
        *(steps(f"step_{network}", f"One step of {network}", network, size, *OURS) for network, size in larger),
        part("Noise and post-processing of a logical step", 4, "postprocess", *rounds),
        steps("one_by_one", "Together and one by one", model, sizes[0], OURS[0], "ours, one by one", types=types[:1]),
        part("Two ranks on one device", 3, "postprocess", *rounds, "--ranks", 2, "--one-device", key="ranks"),
    ]


def earlier(part: Part, machine: str, out: Path) -> dict[str, Any] | None:
    """What the same command has said before on the same machine, on any day."""
    try:
        found: dict[str, Any] = json.loads((out / f"{part.name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    same = found["machine"].rpartition(",")[0] == machine.rpartition(",")[0]
    return found if same and found["command"] == list(part.command) else None


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
    (out / f"{part.name}.json").write_text(json.dumps(result, indent=1))
    print(f"  {state}, {seconds:.0f} s", flush=True)
    return result


def output_of(command: Sequence[str], limit: float) -> tuple[str, int | None]:
    """What a command prints, and its exit status; None where it was stopped, with all that it had started."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as printed:
        into = {"stdout": printed, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **into)
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


def page(machine: str, results: Sequence[tuple[Part, dict[str, Any]]], *, rehearsal: bool = False) -> str:
    """The page in Markdown."""
    small = " This is a rehearsal, with a small network and few images." if rehearsal else ""
    blocks = ["# Speed on a GPU", f"{machine}. Written by `make gpu`.{small}", CARRIED]
    for part, result in results:
        words = (word.replace(f"{ROOT}{os.sep}", "") for word in part.command)
        command = " ".join(f'"{word}"' if " " in word or "," in word else word for word in words)
        blocks += [f"## {part.title}", f"```bash\npython {command}\n```"]
        if result["state"] != "ended":
            blocks.append(f"This part {result['state']}.")
        blocks.append(part.shown(result["printed"]))
        if result["state"].startswith("failed"):
            last = "\n".join(result["printed"].splitlines()[-_LAST:])
            blocks.append(f"```text\n{last}\n```")
        if "seconds" in result:
            blocks.append(f"{result['machine'].rpartition(', ')[2]}, {result['seconds']:.0f} s.")
    return "\n\n".join(filter(None, blocks)) + "\n"


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, help="a folder for what each part prints (runs/gpu, or runs/gpu_rehearsal)")
    parser.add_argument("--page", type=Path, help="the page to write (docs/performance_gpu.md, or a file in --out)")
    parser.add_argument("--limit", type=float, default=40, help="minutes for all parts together (default 40)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a small network and sizes")
    options = parser.parse_args(given)
    # A rehearsal's figures are never taken for those of a GPU.
    options.out = (options.out or ROOT / "runs" / ("gpu_rehearsal" if options.rehearse else "gpu")).resolve()
    at = options.out / "page.md" if options.rehearse else ROOT / "docs" / "performance_gpu.md"
    options.page = options.page or at
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Run what is left, and write the page."""
    import torch

    options = parse(given)
    if not torch.cuda.is_available() and not options.rehearse:
        sys.exit("There is no GPU here that torch can use. Rehearse on the CPU: add --rehearse")
    options.out.mkdir(parents=True, exist_ok=True)
    end, machine = time.monotonic() + 60 * options.limit, hardware()
    not_run: dict[str, Any] = {"state": "was not run yet", "printed": ""}
    results = {part: earlier(part, machine, options.out) or not_run for part in parts(options)}
    for part in results:
        results[part] = run(part, machine, options.out, left=end - time.monotonic())
        # The page is written after each part, so that an interruption loses nothing.
        options.page.write_text(page(machine, list(results.items()), rehearsal=options.rehearse))
    print(f"\n{options.page}")
    if failed := [part.name for part, result in results.items() if result["state"] != "ended"]:
        sys.exit(f"Not all parts ended: {', '.join(failed)}. What they printed is in {options.out}.")


if __name__ == "__main__":
    main()
