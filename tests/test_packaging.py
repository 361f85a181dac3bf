"""Installation from nothing: pins, Makefile, check script and image fit together."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINNED = {canonicalize_name(pin.name): pin for pin in PINS}
EXTRAS = PROJECT["optional-dependencies"]


def requirements() -> list[Requirement]:
    return [
        Requirement(text) for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    ]


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of this name in the Dockerfile, with continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(name + " ")]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_a_pin_is_one_version_from_an_index(pin):
    assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), "no range, no local version"
    assert pin.url is None


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_dependency_is_pinned_within_its_bounds(requirement):
    pin = PINNED[canonicalize_name(requirement.name)]
    (specifier,) = pin.specifier
    assert requirement.specifier.contains(specifier.version)


def test_what_dependencies_need_is_pinned_too():
    """Follows the installed packages' own metadata; torch names the versions of its CUDA libraries itself."""
    from importlib.metadata import PackageNotFoundError, distribution

    waiting = [(canonicalize_name(r.name), frozenset(r.extras)) for r in requirements()]
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


@pytest.mark.parametrize("target", ["install", "quickstart", "test", "lint", "docs", "mutants"])
def test_each_make_target_installs_what_it_needs(target):
    dry = subprocess.run(
        ["make", "--dry-run", "--always-make", target, f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert dry.index("-m venv .venv") < dry.index(
        "pip install -c constraints.txt -e '.[dev,bench,docs,pld,finetune,export,report,slurm,ray]'"
    )
    after = {"quickstart": "dpl fit --config configs/digits.yaml", "test": "-m pytest", "lint": "ruff check"}
    after |= {"docs": "mkdocs build", "mutants": "tools/mutants.py"}
    if target in after:
        assert dry.index("pip install") < dry.index(after[target])


def test_make_refuses_an_old_python_by_name(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "Python 3.8.1"; else exit 1; fi\n')
    old.chmod(0o755)
    run = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "install", f"PYTHON={old}"],
        cwd=_with_metadata(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "Python 3.8.1; Python 3.11 or newer is needed" in run.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_names_a_python_that_is_missing(tmp_path):
    run = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "install", "PYTHON=no-such-python"],
        cwd=_with_metadata(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "There is no 'no-such-python' here" in run.stdout


def test_the_check_script_is_make_test_and_passes_its_status_on(tmp_path):
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    for name in ("make", "apt-get"):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho "{name} $*"\nexit 7\n')
        stand_in.chmod(0o755)
    run = subprocess.run(
        ["bash", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 7
    assert run.stdout.splitlines()[-1] == "make test"


def test_the_image_copies_files_that_exist_and_that_the_build_sees():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for copy in instructions("COPY"):
        *sources, _ = shlex.split(copy)
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source}" in ignore


def test_the_image_runs_dpl_as_an_ordinary_user():
    assert instructions("ENTRYPOINT") == ['["dpl"]']
    assert instructions("USER") == ["dpl"]
    assert instructions("VOLUME") == ['["/cache"]']
    assert instructions("WORKDIR")[-1] == "/project"
    assert "configs ./configs" in instructions("COPY")


def test_torch_is_installed_in_a_layer_before_the_other_dependencies():
    installs = [text for text in instructions("RUN") if "pip install" in text]
    assert shlex.split(installs[0])[-2:] == ["torch", "torchvision"]
    assert all("-c constraints.txt" in text for text in installs[:2])


def test_compose_mounts_the_working_folder_and_the_cache_and_gives_time_to_stop():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert services.keys() == {"dpl", "gpu"}
    for service in services.values():
        assert {volume.rpartition(":")[2] for volume in service["volumes"]} == {"/project", "/cache"}
        assert service["stop_grace_period"] == "2m"
        build = service["build"]
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).resolve() == ROOT / "docker" / "Dockerfile"
    assert "deploy" not in services["dpl"]


@pytest.mark.parametrize("script", ["check.sh", "node.sh", "slurm.sbatch", "smoke.sh"])
def test_a_script_is_valid_bash_and_names_its_arguments(script, tmp_path):
    path = ROOT / "docker" / script
    subprocess.run(["bash", "-n", path], check=True)
    if script != "slurm.sbatch":
        shown = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
        assert shown.returncode == 2
        assert f"usage: docker/{script}" in shown.stderr


# What `docker run` does with the options of docker/smoke.sh, with a shell function in the place of `dpl`.
DOCKER = """#!/usr/bin/env bash
case "$*" in *"--gpus all"*) gpu=1 ;; *) gpu=0 ;; esac
while [ "$1" != dp-lightning ]; do [ "$1" = -v ] && work=${2%%:*}; shift; done
if [ "$2" = doctor ]; then exit 0; fi
if [ $gpu = 1 ]; then echo "No supported gpu backend found" >&2; exit 2; fi
mkdir -p "$work/lightning_logs/version_0"
echo '{"num_steps": 8}' > "$work/lightning_logs/version_0/privacy_statement.json"
echo "device   1 x CPU"
"""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_smoke_test_says_where_it_ran_and_is_not_content_without_the_gpu(device, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = ["bash", ROOT / "docker" / "smoke.sh", device]
    done = subprocess.run(script, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if device == "cpu":
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "device   1 x CPU"
    else:
        assert done.returncode == 2
        assert "The image works" not in done.stdout


def test_the_image_installs_the_pinned_dependencies_of_the_project():
    (listing,) = [text for text in instructions("RUN") if "tomllib" in text]
    command, install = listing.split(" > requirements.txt ")
    assert "pip install --no-cache-dir -c constraints.txt -r requirements.txt" in install
    listed = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    extras = [text for name in ("pld", "finetune", "export", "report") for text in EXTRAS[name]]
    assert listed == [*PROJECT["dependencies"], *extras]


def _with_metadata(folder: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder
