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
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.yaml")
# The copy of the project in which a process of the pool runs its faults.
COPY = Path()
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


def tried(fault: Fault) -> dict[str, str]:
    """The outcome of a fault's tests in the copy of this process, which is left as it was."""
    path, text = COPY / fault.file, (COPY / fault.file).read_text()
    started = time.monotonic()
    try:
        path.write_text(fault.applied(COPY))
        status = _forked(fault.tests)
    except FaultError as error:
        return {"outcome": "broken", "by": "", "said": str(error)}
    finally:
        path.write_text(text)
    by, said = _first_failure()
    if status is None:
        outcome, by, said = "killed", by or fault.tests[0], f"ran for more than {_LIMIT} s"
    elif status == 0:
        outcome = "survived"
    else:
        outcome = "killed" if status == 1 and by and not said.startswith(_BROKEN) else "broken"
        said = said or (COPY / "output.txt").read_text()[-300:]
    if outcome == "killed" and _forked((by,)) != 0:
        outcome, said = "broken", f"{by} does not pass without the fault either: {_first_failure()[1]}"
    return {"outcome": outcome, "by": by, "said": said, "seconds": f"{time.monotonic() - started:.1f}"}


def _first_failure() -> tuple[str, str]:
    """The test and its error; empty if none has failed."""
    path = COPY / "failure.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else ("", "")


def _forked(tests: tuple[str, ...]) -> int | None:
    """Run tests in a fork, in the copy; returns pytest's status, None if they took too long."""
    (COPY / "failure.json").unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        _run(tests)
    ends, ended = time.monotonic() + _LIMIT, (0, 0)
    try:
        while not ended[0] and time.monotonic() < ends:
            time.sleep(0.05)
            ended = os.waitpid(process, os.WNOHANG)
    finally:
        if not ended[0]:  # the tests hang, or the run was stopped
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None


def _run(tests: tuple[str, ...]) -> None:
    """In the fork: never returns."""
    os.setsid()  # so that what the tests start can be ended with them
    import numpy as np
    import pytest

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                said = str(report.longrepr) if crash is None else crash.message
                (COPY / "failure.json").write_text(json.dumps([report.nodeid, said[:300]]))

    with (COPY / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(COPY)
    sys.path[0], sys.dont_write_bytecode = str(COPY), True
    os.environ |= {"PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
    random.seed()
    np.random.seed()
    options = ["-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={COPY / 'tmp'}"]
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
    if not waiting:
        return found
    os.environ["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // jobs, 1))
    for name in _PRELOADED:
        import_module(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    processes = {"max_workers": min(jobs, len(waiting)), "mp_context": multiprocessing.get_context("fork")}
    with (
        tempfile.TemporaryDirectory() as folder,
        out.open("a") as file,
        ProcessPoolExecutor(**processes, initializer=_copy, initargs=(Path(folder),)) as pool,
    ):
        futures = {pool.submit(tried, fault): fault.name for fault in waiting}
        for future in as_completed(futures):
            name, outcome = futures[future], future.result()
            found[name] = {"name": name, "digest": digests[name], **outcome}
            file.write(json.dumps(found[name]) + "\n")
            file.flush()
            print(f"{outcome['outcome']:9} {name}", flush=True)
    return found


def _copy(folder: Path) -> None:
    """Give this process a copy of what the tests read."""
    global COPY
    COPY = folder / str(os.getpid())
    COPY.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, COPY / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, COPY / name)


def table(faults: list[Fault], found: dict[str, dict[str, str]]) -> tuple[str, bool]:
    """What to print at the end, and whether nothing is left to explain."""
    lines, fine, outcomes = [], True, [found[fault.name]["outcome"] for fault in faults]
    for promise in dict.fromkeys(fault.promise for fault in faults):
        mine = [found[fault.name]["outcome"] for fault in faults if fault.promise == promise]
        lines.append(f"{mine.count('killed'):3} of {len(mine):2}  {promise}")
    for fault, outcome in zip(faults, outcomes, strict=True):
        expected = "survived" if fault.survives else "killed"
        if outcome != "killed" or fault.survives:
            why = fault.survives if outcome == expected else found[fault.name]["said"].strip()
            why = f"It was expected to survive: {fault.survives}" if outcome == "killed" else why
            lines.append(f"\n{outcome}: {fault.name}\n    {why}")
            fine = fine and outcome == expected
    total = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("killed", "survived", "broken"))
    return "\n".join([*lines, f"\n{len(faults)} faults: {total}."]), fine


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the table, and exit with 1 if something is left to explain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of faults, or parts of them; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="where outcomes are kept")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    options = parser.parse_args(arguments)
    faults = [f for f in read_faults() if not options.names or any(name in f.name for name in options.names)]
    text, fine = table(faults, run(faults, options.out, options.jobs))
    print(f"\n{text}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
