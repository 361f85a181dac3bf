"""The installed Python and packages beside what the metadata of dp-lightning asks for."""

import platform
import tomllib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dp_lightning import __version__
from dp_lightning.commands.doctor import Finding

_NAME = "dp-lightning"
# What the extras of pyproject.toml are for.
PURPOSES = {
    "pld": "the PLD accountant",
    "finetune": "trained: lora",
    "docs": "make docs",
    "export": "dpl export",
    "report": "figures of dpl report, analyze, audit and plan",
    "slurm": "dpl sweep --launcher slurm",
    "ray": "dpl sweep --launcher ray",
    "bench": "the comparison with jax_privacy in benchmarks/step.py",
    "dev": "the tests",
}


def python() -> Iterator[Finding]:
    """Python and dp-lightning itself."""
    try:
        asked, installed = str(metadata(_NAME)["Requires-Python"]), version(_NAME)
    except PackageNotFoundError:
        yield Finding(
            "problem",
            "Python",
            f"{platform.python_version()}; dp-lightning itself is not installed",
            "install it, with pip install -e . in the folder of its source",
        )
        return
    ours = f"{platform.python_version()} on {platform.system()}, dp-lightning {__version__}"
    if not SpecifierSet(asked).contains(platform.python_version(), prereleases=True):
        yield Finding("problem", "Python", f"{ours} asks for Python {asked}", "make a virtual environment with it")
    elif installed != __version__:
        yield Finding(
            "warning",
            "Python",
            f"{ours}, installed as {installed}",
            "install it again, with pip install -e . in the folder of its source",
        )
    else:
        yield Finding("ok", "Python", ours)


def packages() -> Iterator[Finding]:
    """Every package that dp-lightning always needs, and what is missing of those that they need."""
    for requirement, by in _needed():
        if by == _NAME:
            yield _finding(requirement)
        elif _version(requirement.name) is None:
            install = f"install it, with pip install '{requirement.name}{requirement.specifier}'"
            yield Finding("warning", requirement.name, f"not installed; {by} asks for it", install)


def missing() -> list[str]:
    """Those of them that are not installed."""
    return [requirement.name for requirement, _ in _needed() if _version(requirement.name) is None]


def extras() -> Iterator[Finding]:
    """The optional packages, by the extra that asks for them."""
    by_extra: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in _requirements():
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        for extra in metadata(_NAME).get_all("Provides-Extra") or ():
            if requirement.marker.evaluate({"extra": extra}):
                by_extra[extra].append(requirement)
    for extra, asked in by_extra.items():
        found = [_finding(requirement) for requirement in asked]
        purpose = PURPOSES.get(extra, "an extra of this installation")
        missing = [requirement.name for requirement in asked if _version(requirement.name) is None]
        wrong = [finding for finding in found if finding.level != "ok"]
        install = f"install it, with pip install '{_NAME}[{extra}]'"
        if missing:
            yield Finding(
                "ok", f"[{extra}]", f"{purpose}; not installed: {', '.join(missing)}", f"{install}, if you need it"
            )
        elif wrong:
            yield Finding("warning", f"[{extra}]", f"{purpose}: {'; '.join(each.found for each in wrong)}", install)
        else:
            yield Finding("ok", f"[{extra}]", purpose)


def _needed() -> Iterator[tuple[Requirement, str]]:
    """What dp-lightning asks for, what that asks for, and so on, once each, with the name of the first who asks."""
    waiting = deque((requirement, _NAME) for requirement in _applying(_requirements(), set()))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, by = waiting.popleft()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        yield requirement, by
        with suppress(PackageNotFoundError):
            asked = map(Requirement, requires(requirement.name) or ())
            waiting.extend((each, requirement.name) for each in _applying(asked, requirement.extras))


def _applying(requirements: Iterable[Requirement], extras: set[str]) -> list[Requirement]:
    """Those for this machine, and for these extras of who asks."""
    return [
        each
        for each in requirements
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in requires(_NAME) or ()]
    except PackageNotFoundError:  # which `python` reports
        return _of_the_checkout()


def _of_the_checkout() -> list[Requirement]:
    """What the folder of the source asks for, from which dpl runs where it is not installed."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return []
    return [Requirement(text) for text in tomllib.loads(project.read_text())["project"]["dependencies"]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _finding(requirement: Requirement) -> Finding:
    name, asked, found = requirement.name, str(requirement.specifier), _version(requirement.name)
    install = f"install it, with pip install '{name}{asked}'"
    if found is None:
        return Finding("problem", name, f"not installed; {asked} is needed", install)
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding("problem", name, f"{name} {found}, which is not {asked}", install)
    return Finding("ok", name, f"{found} ({asked})")
