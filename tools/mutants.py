"""Checks that the tests notice a broken promise: applies each fault of ``faults.yaml`` to a copy and runs its tests.

    python tools/mutants.py                                   # all faults, two at a time
    python tools/mutants.py "half the noise" --out again.jsonl

A fault is killed when one of its tests fails with it and passes without it. Outcomes are kept in a file, line by line,
so that a stopped run resumes; they stay valid as long as the code, the tests and the fault are the same. Exits with 1
if a fault survives without an explanation (``survives``), is broken, or no longer applies.

Each fault runs in a fork of a process that has imported the third-party packages, which take seconds.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.yaml")
# What the tests read.
_COPIED = ("dp_lightning", "tests", "benchmarks", "configs", "docs", "cli.py", "pyproject.toml", "README.md")
_PRELOADED = ("torchvision", "lightning.pytorch", "opacus.accountants", "timm", "torchmetrics", "scipy.stats")
_PRELOADED += ("sklearn.datasets", "dp_accounting.pld.privacy_loss_distribution", "hypothesis", "pytest")
# Seconds for all tests of a fault; one that makes them hang is noticed too.
_LIMIT = 120
# A fault that ends in one of these is itself wrong.
_BROKEN = ("NameError", "SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")


class FaultError(Exception):
    """A fault that cannot be applied."""


@dataclass(frozen=True)
class Fault:
    """An entry of ``faults.yaml``.

    Attributes:
        name: a description in words.
        promise: the promise of docs/contract.md that it breaks.
        file: the file that it changes.
        old, new: the text that it replaces, which occurs in the file once, and the new text.
        tests: pytest's names of the tests that should notice it.
        survives: why they do not, if that is known and accepted.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def applied(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            FaultError: if the old text does not occur exactly once, or the new text is not valid Python.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise FaultError(f"{self.name}: its old text occurs {count} times in {self.file}, not once. Adapt it.")
        changed = text.replace(self.old, self.new)
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))
        except SyntaxError as error:
            raise FaultError(f"{self.name}: {self.file} is not valid Python with it ({error}).") from error
        if same:
            raise FaultError(f"{self.name}: it changes nothing in {self.file}.")
        return changed


def read_faults() -> list[Fault]:
    """The faults of ``faults.yaml``."""
    entries = yaml.safe_load(FAULTS.read_text())
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def digest_of(fault: Fault, root: Path) -> str:
    """A digest that changes with the fault, the package and the tests."""
    found = hashlib.sha256(repr(replace(fault, survives="")).encode())
    for folder in ("dp_lightning", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def tried(fault: Fault, copy: Path) -> Iterator[dict[str, str] | None]:
    """Run a fault's tests: None while they run, then the outcome. The copy is left as it was."""
    path, text = copy / fault.file, (copy / fault.file).read_text()
    started = time.monotonic()
    try:
        path.write_text(fault.applied(copy))
        status = yield from _forked(fault.tests, copy)
    except FaultError as error:
        yield {"outcome": "broken", "by": "", "said": str(error)}
        return
    finally:
        path.write_text(text)
    by, said = _first_failure(copy)
    if status is None:
        outcome, by, said = "killed", by or fault.tests[0], f"ran for more than {_LIMIT} s"
    elif status == 0:
        outcome = "survived"
    else:
        outcome = "killed" if status == 1 and by and not said.startswith(_BROKEN) else "broken"
        said = said or (copy / "output.txt").read_text()[-300:]
    if outcome == "killed":
        without = yield from _forked((by,), copy)
        if without != 0:
            outcome, said = "broken", f"{by} does not pass without the fault either: {_first_failure(copy)[1]}"
    yield {"outcome": outcome, "by": by, "said": said, "seconds": f"{time.monotonic() - started:.1f}"}


def _first_failure(copy: Path) -> tuple[str, str]:
    """The test and its error; empty if none has failed."""
    path = copy / "failure.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else ("", "")


def _forked(tests: tuple[str, ...], copy: Path) -> Generator[None, None, int | None]:
    """Run tests in a fork, in the copy; returns pytest's status, None if they took too long."""
    (copy / "failure.json").unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        _run(tests, copy)
    ends, ended = time.monotonic() + _LIMIT, (0, 0)
    try:
        while not ended[0] and time.monotonic() < ends:
            yield None
            ended = os.waitpid(process, os.WNOHANG)
    finally:
        if not ended[0]:  # the tests hang, or the run was stopped
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None


def _run(tests: tuple[str, ...], copy: Path) -> None:
    """In the fork: never returns."""
    os.setsid()  # so that what the tests start can be ended with them
    import numpy as np
    import pytest

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                said = str(report.longrepr) if crash is None else crash.message
                (copy / "failure.json").write_text(json.dumps([report.nodeid, said[:300]]))

    with (copy / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(copy)
    sys.path[0], sys.dont_write_bytecode = str(copy), True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    random.seed()
    np.random.seed()
    options = ["-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={copy / 'tmp'}"]
    try:
        status = int(pytest.main([*options, *tests], plugins=[Failures()]))
    except BaseException:
        status = 3
    sys.stdout.flush()
    os._exit(status)


def run(faults: list[Fault], out: Path, jobs: int) -> dict[str, dict[str, str]]:
    """The outcome of each fault by its name; those that ``out`` holds are not tried again."""
    digests = {fault.name: digest_of(fault, ROOT) for fault in faults}
    lines = out.read_text().splitlines() if out.is_file() else []
    found = {entry["name"]: entry for entry in map(json.loads, lines) if digests.get(entry["name"]) == entry["digest"]}
    waiting = [fault for fault in faults if fault.name not in found]
    os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // jobs, 1))
    for name in _PRELOADED if waiting else ():
        import_module(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, out.open("a") as file:
        free = [_copied(Path(folder) / str(job)) for job in range(min(jobs, len(waiting)))]
        running: dict[Path, tuple[Fault, Iterator[dict[str, str] | None]]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    copy, fault = free.pop(), waiting.pop(0)
                    running[copy] = fault, tried(fault, copy)
                for copy, (fault, steps) in list(running.items()):
                    if (outcome := next(steps)) is None:
                        continue
                    steps.close()
                    free.append(copy)
                    del running[copy]
                    found[fault.name] = {"name": fault.name, "digest": digests[fault.name], **outcome}
                    file.write(json.dumps(found[fault.name]) + "\n")
                    file.flush()
                    print(f"{outcome['outcome']:9} {fault.name}", flush=True)
                time.sleep(0.05)
        finally:
            for _, steps in running.values():
                steps.close()
    return found


def _copied(copy: Path) -> Path:
    copy.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


def table(faults: list[Fault], found: dict[str, dict[str, str]]) -> tuple[str, bool]:
    """What to print at the end, and whether nothing is left to explain."""
    lines, counts, fine = [], dict.fromkeys(("killed", "survived", "broken"), 0), True
    promises = dict.fromkeys(fault.promise for fault in faults)
    for promise in promises:
        mine = [found[fault.name]["outcome"] for fault in faults if fault.promise == promise]
        lines.append(f"{mine.count('killed'):3} of {len(mine):2}  {promise}")
    for fault in faults:
        outcome = found[fault.name]["outcome"]
        counts[outcome] += 1
        explained = fault.survives and outcome == "survived"
        if outcome != "killed":
            why = fault.survives if explained else found[fault.name]["said"].strip()
            lines.append(f"\n{outcome}: {fault.name}\n    {why}")
            fine = fine and bool(explained)
        elif fault.survives:
            lines.append(f"\nkilled: {fault.name}\n    It was expected to survive: {fault.survives}")
            fine = False
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return "\n".join([*lines, f"\n{len(faults)} faults: {total}."]), fine


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from the command line if ``arguments`` is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of faults, or parts of them; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="where outcomes are kept")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    return parser.parse_args(arguments)


def main() -> None:
    """Run, print the table, and exit with 1 if something is left to explain."""
    options = parse()
    faults = [f for f in read_faults() if not options.names or any(name in f.name for name in options.names)]
    text, fine = table(faults, run(faults, options.out, options.jobs))
    print(f"\n{text}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
