"""Installation from nothing: pins, Makefile, check script and image fit together."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(text) for part in (PROJECT["dependencies"], *EXTRAS.values()) for text in part]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINNED = {
    canonicalize_name(pin.name): pin for pin in (Requirement(line) for line in LINES if line[:1] not in ("", "#"))
}


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of this name in the Dockerfile, with continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(name + " ")]


def test_dependencies_are_pinned_to_one_version_within_their_bounds():
    for pin in PINNED.values():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{pin} is a range or a local version"
        assert pin.url is None
    for requirement in REQUIREMENTS:
        (specifier,) = PINNED[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(specifier.version), requirement


def test_what_dependencies_need_is_pinned_too():
    """Follows the installed packages' own metadata; torch names the versions of its CUDA libraries itself."""
    waiting = [(canonicalize_name(r.name), frozenset(r.extras)) for r in REQUIREMENTS]
    seen, missing = set(waiting), set()
    while waiting:
        name, extras = waiting.pop()
        if name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        if name not in PINNED:
            missing.add(name)
        for requirement in map(Requirement, needed):
            environments = [{"extra": extra} for extra in extras or {""}]
            if requirement.marker and not any(requirement.marker.evaluate(e) for e in environments):
                continue
            item = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if item not in seen:
                seen.add(item)
                waiting.append(item)
    assert not missing


@pytest.mark.parametrize(
    ("target", "runs", "everything"),
    [
        ("quickstart", "dpl fit --config configs/digits.yaml", False),
        ("test", "-m pytest", True),
        ("lint", "ruff check", True),
        ("docs", "mkdocs build", True),
        ("mutants", "tools/mutants.py", True),
    ],
)
def test_each_make_target_installs_what_it_needs(target, runs, everything):
    make = ["make", "--dry-run", "--always-make", target, f"PYTHON={sys.executable}"]
    dry = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    package, extras = "-c constraints.txt -e .\n", f"-e '.[{','.join(['dev', 'docs'])}"
    assert dry.index("-m venv .venv") < dry.index(package) < dry.index(runs)
    assert (extras in dry) == everything
    if everything:
        assert dry.index(package) < dry.index(extras) < dry.index(runs)
        (installed,) = re.findall(r"-e '\.\[(.*)\]'", dry)
        assert set(installed.split(",")) == EXTRAS.keys()


def test_make_names_a_python_that_it_cannot_take(tmp_path):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "Python 3.8.1"; else exit 1; fi\n')
    old.chmod(0o755)
    make = ["make", "-f", ROOT / "Makefile", "install", f"PYTHON={old}"]
    run = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "Python 3.8.1; Python 3.11 or newer is needed" in run.stdout
    assert not (tmp_path / ".venv").exists()


def test_the_image_installs_the_pinned_dependencies_and_copies_what_the_build_sees():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copy in instructions("COPY"):
        *sources, _ = shlex.split(copy)
        assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources)
    torch, listing, *_ = [text for text in instructions("RUN") if "pip install" in text]
    assert shlex.split(torch)[-2:] == ["torch", "torchvision"]  # in a layer of their own, which changes least
    command, install = listing.split(" > requirements.txt ")
    assert all("-c constraints.txt" in text for text in (torch, install))
    shown = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    extras = [text for name in ("pld", "finetune", "dicom", "export", "report") for text in EXTRAS[name]]
    assert shown.splitlines() == [*PROJECT["dependencies"], *extras]


@pytest.mark.parametrize("script", ["check.sh", "node.sh", "slurm.sbatch", "smoke.sh"])
def test_a_script_is_valid_bash_and_names_its_arguments(script):
    path = ROOT / "docker" / script
    subprocess.run(["bash", "-n", path], check=True)
    if script != "slurm.sbatch":
        shown = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
        assert shown.returncode == 2
        assert f"usage: docker/{script}" in shown.stderr
