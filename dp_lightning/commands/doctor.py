"""`dpl doctor`: what this machine has, and whether dpl will run well on it.

It compares the installed packages with what dp-lightning asks for, looks at processors, memory, disk and caches, tries
what a private run needs of the operating system in the current folder, and compares one private step with a loop over
single examples. Each line is ok, a warning or a problem, with what to do.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

_WIDTH = 80
_BROKEN = "solve what is above; if nothing is, report it"
#: From harmless to serious.
LEVELS = ("ok", "warning", "problem")


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        level: one of ``LEVELS``.
        subject: what was looked at.
        found: what it is.
        fix: what to do; empty if there is nothing to do.
    """

    level: str
    subject: str
    found: str
    fix: str = ""


def judged(subject: str, found: str, *, holds: bool, fix: str, level: str = "warning") -> Finding:
    """The finding ok where something holds, and else of this level, with what to do."""
    return Finding("ok", subject, found) if holds else Finding(level, subject, found, fix)


# What is checked, the module of the check, imported when it is its turn, and its function.
_CHECKS = (
    ("Python", "package_checks", "python"),
    ("packages", "package_checks", "packages"),
    ("extras", "package_checks", "extras"),
    ("memory", "machine_checks", "memory"),
    ("disk", "machine_checks", "disk"),
    ("files", "machine_checks", "files"),
    ("randomness", "machine_checks", "randomness"),
    ("cores", "torch_checks", "cores"),
    ("GPU", "torch_checks", "gpus"),
    ("weights", "torch_checks", "weights"),
    ("private step", "step_check", "private_step"),
)


def main(arguments: list[str]) -> None:
    """Print the report; exits with 1 if there is a problem."""
    options = _parser().parse_args(arguments[1:])
    with suppress(ImportError):  # the check of packages says what is missing
        import_module("dp_lightning.cores").respect_quota()
    found: list[Finding] = []
    for subject, module, name in _CHECKS:
        for finding in _completed(subject, module, name):
            found.append(finding)
            if not options.json:
                print(_shown(finding), flush=True)
    worst = max(LEVELS.index(finding.level) for finding in found)
    if options.json:
        print(json.dumps({"holds": LEVELS[worst] != "problem", "findings": [each._asdict() for each in found]}))
    else:
        print(f"\n{_summary(found)}")
    sys.exit(1 if LEVELS[worst] == "problem" else 0)


def _completed(subject: str, module: str, name: str) -> Iterator[Finding]:
    """What the check finds; an error is a problem, and the other checks still run."""
    try:
        yield from getattr(import_module(f"dp_lightning.commands.{module}"), name)()
    except Exception as error:
        yield Finding("problem", subject, f"the check ended by {type(error).__name__}: {error}", _BROKEN)


def _shown(finding: Finding) -> str:
    text = f"{finding.found}. {finding.fix[:1].upper()}{finding.fix[1:]}." if finding.fix else finding.found
    printable = "".join(character if character.isprintable() else "?" for character in text)
    start = f"{finding.level:<8} {finding.subject:<13} "
    return textwrap.fill(
        printable, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def _summary(found: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS[1:]}
    if not any(counts.values()):
        return "Everything is ok."
    return f"{counts['problem']} problems, {counts['warning']} warnings."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl doctor", description=__doc__, epilog="Exits with 1 if there is a problem.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
