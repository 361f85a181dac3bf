"""Everything that a machine with a GPU has to tell, in one command, written to ``docs/performance_gpu.md``.

The parts run one after the other, each in its own process and under a limit of its own: the tests that need a GPU, the
step table, noise and post-processing, and several ranks. Together they may take longer than ``--limit``: what matters
most comes first. Run ``python benchmarks/gpu.py --help``.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from measuring import ROOT, arguments, hardware

OURS = ("ours flat", "ours per-layer")
OPACUS = ("Opacus hooks", "Opacus functorch", "Opacus ghost")
TYPES = ("fp32", "tf32", "bf16")

# Lines that the page shows of what a part that failed has printed.
_LAST = 12


class Part(NamedTuple):
    """One process."""

    title: str
    command: tuple[str, ...]
    """What stands after the interpreter."""
    minutes: float
    """The part is stopped after so many minutes."""


def parts() -> list[Part]:
    """What is run, in this order: what matters most comes first."""

    def steps(title: str, network: str, size: int, *ways: str, types: Sequence[str] = TYPES) -> Part:
        chosen = ("--models", network, "--types", *types, "--batch-size", str(size), "--ways", *ways)
        return Part(title, ("benchmarks/step.py", *chosen, "--formats", "contiguous", "--warmup", "1"), 4)

    ranks = ("benchmarks/postprocess.py", "--ranks", "2", "--one-device")
    return [
        Part("Tests that need a GPU", ("-m", "pytest", "-n", "0", "-m", "gpu", "tests"), 8),
        *(steps(f"One step of wrn16-4, {n} images", "wrn16-4", n, *OURS, *OPACUS) for n in (64, 256, 1024)),
        *(steps(f"One step of {name}", name, size, *OURS) for name, size in (("wrn28-10", 256), ("vit-s16", 64))),
        Part("Noise and post-processing of a logical step", ("benchmarks/postprocess.py",), 4),
        steps("Together and one by one", "wrn16-4", 64, OURS[0], "ours, one by one", types=TYPES[:1]),
        Part("Two ranks on one device", ranks, 3),
    ]


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


def section(part: Part, limit: float) -> tuple[str, bool]:
    """Run a part; returns its section of the page in Markdown, and whether the part has ended without an error."""
    command = " ".join(f'"{word}"' if " " in word or "," in word else word for word in part.command)
    blocks = [f"## {part.title}", f"```bash\npython {command}\n```"]
    if limit < 20:
        return "\n\n".join([*blocks, "This part was not run: no time was left."]), False
    start = time.monotonic()
    printed, code = output_of([sys.executable, *part.command], limit)
    lines = printed.splitlines()
    if code is None:
        blocks.append(f"This part was stopped after {limit:.0f} s.")
    elif code:
        blocks.append(f"This part failed with exit status {code}.")
    tables = "\n".join(line for line in lines if line.startswith("|") or not line).strip("\n")
    # The last line of pytest has the number of tests.
    blocks.append(lines[-1].strip("= ") if lines and "pytest" in part.command else tables)
    if code:
        blocks.append("\n".join(["```text", *lines[-_LAST:], "```"]))
    blocks.append(f"{time.monotonic() - start:.0f} s.")
    return "\n\n".join(filter(None, blocks)), code == 0


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance_gpu.md", help="the page to write")
    parser.add_argument("--limit", type=float, default=40, help="minutes for all parts together (default 40)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Run the parts, and write the page."""
    import torch

    options = parse(given)
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here that torch can use.")
    end, failed = time.monotonic() + 60 * options.limit, []
    page = f"# Speed on a GPU\n\n{hardware()}. Written by `make gpu`, which runs in a checkout of the source. The\n"
    page += "tables of a step have the columns of [Speed and memory of a step](performance.md).\n"
    for part in parts():
        print(part.title, flush=True)
        text, ended = section(part, min(60 * part.minutes, end - time.monotonic()))
        failed += [] if ended else [part.title]
        # The page is written after each part, so that an interruption loses nothing.
        page += f"\n{text}\n"
        options.page.write_text(page)
    if failed:
        sys.exit(f"Not all parts ended: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
