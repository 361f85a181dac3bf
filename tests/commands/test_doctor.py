"""``dpl doctor``: this machine passes, and what is wrong is found and named with what to do."""

from importlib.metadata import PackageNotFoundError, requires, version

import pytest
import torch
from packaging.requirements import Requirement

from dp_lightning.cli import main
from dp_lightning.commands import doctor
from dp_lightning.privacy.clipping import ClipPlan


def run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    found = [(line[:9].strip(), *line[9:].split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()]
    return ended.value.code, {subject: (level, text) for level, subject, text in found}


def test_a_machine_on_which_these_tests_run_has_no_problem(capsys):
    code, found = run(capsys)
    assert code == 0
    assert {"Python", "CPU", "GPU", "private"} <= set(found)
    for requirement in map(Requirement, requires("dp-lightning")):
        if requirement.marker is None:
            assert found[requirement.name] == ("ok", f"{version(requirement.name)} ({requirement.specifier})")


def test_a_package_that_is_missing_or_outdated_is_named_with_what_installs_it(capsys, monkeypatch):
    def stand_in(name):
        if name == "timm":
            raise PackageNotFoundError(name)
        return "1.0" if name == "torch" else version(name)

    monkeypatch.setattr(doctor, "version", stand_in)
    code, found = run(capsys)
    assert code == 1
    (needed,) = [each for each in map(Requirement, requires("dp-lightning")) if each.name == "torch"]
    assert found["torch"] == ("problem", f"1.0; install it by pip install '{needed}'")
    assert found["timm"][1].startswith("not installed; install it by pip install 'timm")


def no_clipping(monkeypatch):
    monkeypatch.setattr(ClipPlan, "factors", lambda self, norms, bounds: torch.ones_like(norms))


def a_step_that_cannot_run(monkeypatch):
    monkeypatch.setattr(doctor, "difference", lambda device: 1 / 0)


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (no_clipping, "at most 0.0001 is rounding"),
        (a_step_that_cannot_run, "ended by ZeroDivisionError"),
    ],
)
def test_a_private_step_that_computes_something_else_is_a_problem(plant, told, capsys, monkeypatch):
    plant(monkeypatch)
    code, found = run(capsys)
    assert code == 1
    level, text = found.get("private") or found["private_step"]
    assert level == "problem"
    assert told in text
