"""``dpl doctor``: this machine passes, and what is wrong is found and named with what to do."""

import json
import sys
import tomllib
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from dp_lightning.cli import main
from dp_lightning.commands import doctor, machine_checks, package_checks, step_check, torch_checks
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients import clipped_sum


def run(capsys, *options):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *options])
    return ended.value.code, capsys.readouterr().out


def levels(findings):
    return [finding.level for finding in findings]


@pytest.fixture
def installed(monkeypatch):
    """Versions that stand in for the installed ones; None is not installed."""
    stand_ins = {}

    def stand_in(name):
        found = stand_ins.get(name, "as it is")
        if found is None:
            raise PackageNotFoundError(name)
        return version(name) if found == "as it is" else found

    monkeypatch.setattr(package_checks, "version", stand_in)
    return stand_ins


def test_a_machine_on_which_these_tests_run_has_no_problem(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out = run(capsys, "--json")
    (line,) = out.splitlines()
    report = json.loads(line)
    assert report["holds"] is True
    assert code == 0
    found = {finding["subject"]: finding for finding in report["findings"]}
    assert {"Python", "GPU", "cores", "memory", "disk", "files", "fsync", "randomness", "private step"} <= set(found)
    for requirement in map(Requirement, requires("dp-lightning")):
        if requirement.marker is None:
            assert found[requirement.name]["found"] == f"{version(requirement.name)} ({requirement.specifier})"
    assert str(tmp_path) in found["disk"]["found"]
    assert not list(tmp_path.iterdir())


def test_every_extra_is_explained():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(package_checks.PURPOSES) == set(project["optional-dependencies"])


def test_a_package_outside_of_its_range_is_a_problem_with_the_command_that_mends_it(installed, capsys, monkeypatch):
    installed |= {"torch": "1.0", "timm": None}
    found = {finding.subject: finding for finding in package_checks.packages()}
    (needed,) = [r for r in map(Requirement, requires("dp-lightning")) if r.name == "torch"]
    assert found["torch"].level == found["timm"].level == "problem"
    assert found["torch"].found == f"torch 1.0, which is not {needed.specifier}"
    assert found["torch"].fix == f"install it, with pip install '{needed}'"
    assert package_checks.missing() == ["timm"]
    assert found["timm"].found.startswith("not installed")
    assert found["lightning"].level == "ok"
    monkeypatch.setattr(doctor, "_CHECKS", (("packages", "package_checks", "packages"),))
    code, out = run(capsys)
    assert code == 1
    assert "2 problems, 0 warnings." in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_the_packages_need_is_looked_for_too(installed, monkeypatch):
    asked = {
        "dp-lightning": ["a[fast]>=1", "Some_B", "only-an-extra; extra == 'x'"],
        "a": ["c>=2; extra == 'fast'", "d; extra == 'slow'", "some.b"],
        "c": ["a", "other-platform; sys_platform == 'none'", "e<9"],
    }
    monkeypatch.setattr(package_checks, "requires", lambda name: asked.get(name, []))
    installed |= {"a": "1", "Some_B": "1", "c": "1"} | dict.fromkeys(("some.b", "d", "e", "other-platform"))
    found = list(package_checks.packages())
    assert [(each.subject, each.level) for each in found] == [("a", "ok"), ("Some_B", "ok"), ("e", "warning")]
    assert found[-1].found == "not installed; c asks for it"
    assert found[-1].fix == "install it, with pip install 'e<9'"
    assert package_checks.missing() == ["e"]


def test_packages_are_named_where_they_are_missing_and_dpl_is_not_installed(monkeypatch, capsys):
    """In a folder of the source, on a machine that has some of them."""
    for name in ("joblib", "xxhash"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "dp_lightning.cores", raising=False)

    def absent(name):
        if name in ("joblib", "xxhash", "dp-lightning"):
            raise PackageNotFoundError(name)
        return version(name)

    for name in ("version", "metadata"):
        monkeypatch.setattr(package_checks, name, absent)
    monkeypatch.setattr(package_checks, "requires", lambda name: absent(name) and [])
    monkeypatch.setattr(doctor, "_CHECKS", doctor._CHECKS[:3])
    code, out = run(capsys, "--json")
    found = {finding["subject"]: finding["found"] for finding in json.loads(out)["findings"]}
    assert code == 1
    assert found["joblib"].startswith("not installed")
    assert found["xxhash"].startswith("not installed")
    assert found["torch"].startswith(version("torch"))
    assert "itself is not installed" in found["Python"]
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "runs"])
    assert "error: The package joblib is not installed. `dpl doctor`" in capsys.readouterr().err


def test_an_extra_may_be_missing_but_not_outdated(installed):
    installed |= {"matplotlib": None, "dp-accounting": "0.1"}
    found = {finding.subject: finding for finding in package_checks.extras()}
    assert found["[report]"].level == "ok"
    assert "not installed: matplotlib" in found["[report]"].found
    assert found["[report]"].fix == "install it, with pip install 'dp-lightning[report]', if you need it"
    assert (found["[pld]"].level, found["[pld]"].fix) == ("warning", "install it, with pip install 'dp-lightning[pld]'")


def test_python_and_the_installation_itself_are_compared(installed, monkeypatch):
    assert levels(package_checks.python()) == ["ok"]
    installed["dp-lightning"] = "0.0.1"
    assert levels(package_checks.python()) == ["warning"]
    installed["dp-lightning"] = None
    assert levels(package_checks.python()) == ["problem"]
    del installed["dp-lightning"]
    monkeypatch.setattr(package_checks.platform, "python_version", lambda: "3.9.1")
    (finding,) = package_checks.python()
    assert finding.level == "problem"
    assert "asks for Python >=3.11" in finding.found


def test_a_check_that_ends_by_an_error_is_a_problem_and_the_others_still_run(capsys, monkeypatch):
    checks = (("nothing", "no_such_module", "x"), ("memory", "machine_checks", "memory"))
    monkeypatch.setattr(doctor, "_CHECKS", checks)
    code, out = run(capsys)
    assert code == 1
    first, *others = out.splitlines()
    assert first.startswith("problem  nothing       the check ended by ModuleNotFoundError")
    assert any(" memory " in line for line in others)


def test_characters_that_move_the_cursor_are_not_printed(capsys, monkeypatch, tmp_path):
    (tmp_path / "a\x1b[2Jb").mkdir()
    monkeypatch.chdir(tmp_path / "a\x1b[2Jb")
    monkeypatch.setattr(doctor, "_CHECKS", (("disk", "machine_checks", "disk"),))
    assert "\x1b" not in run(capsys)[1]


def test_a_folder_that_takes_no_files_is_a_problem(monkeypatch):
    monkeypatch.chdir("/proc")
    (finding,) = machine_checks.files()
    assert finding.level == "problem"
    assert "/proc cannot be written to" in finding.found


def test_files_that_are_overwritten_in_place_are_a_problem(monkeypatch, tmp_path):
    @contextmanager
    def in_place(path):
        with path.open("wb", buffering=0) as file:
            yield file

    monkeypatch.chdir(tmp_path)
    assert levels(machine_checks.files()) == ["ok", "ok"]
    monkeypatch.setattr(machine_checks, "replacing", in_place)
    assert levels(machine_checks.files()) == ["problem", "ok"]


def test_a_slow_disk_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_checks, "_time_of_sync", lambda folder: 0.5)
    *_, finding = machine_checks.files()
    assert finding.level == "warning"
    assert "after 500.0 ms, which each step waits for" in finding.found


@pytest.mark.parametrize("drawn", [(0x55, 0x55), (0x00, 0x01), (0xFE, 0xFF)], ids=["repeated", "few ones", "few zeros"])
def test_random_numbers_that_can_be_predicted_are_a_problem(drawn, monkeypatch):
    assert levels(machine_checks.randomness()) == ["ok"]
    values = iter(drawn)
    monkeypatch.setattr(machine_checks.secrets, "token_bytes", lambda count: bytes([next(values)]) * count)
    assert levels(machine_checks.randomness()) == ["problem"]


@pytest.mark.parametrize("check", ["memory", "disk"])
def test_little_room_is_a_warning(check, monkeypatch):
    monkeypatch.setattr(machine_checks, f"_LEAST_{check.upper()}", 2**60)
    assert levels(getattr(machine_checks, check)()) == ["warning"]


def test_more_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert levels(torch_checks.cores()) == ["ok"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert levels(torch_checks.cores()) == ["warning"]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that torch reports; its free memory and capability can be set."""
    facts = {"free": 70, "capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: facts["capability"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (facts["free"] * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a", "compute_120"])
    return facts


def test_a_gpu_is_named_with_its_memory(gpu):
    (finding,) = torch_checks.gpus()
    assert finding.level == "ok"
    assert finding.found.startswith("A GPU, 70.0 of 80.0 GiB free")
    gpu["free"] = 1
    assert levels(torch_checks.gpus()) == ["warning"]
    gpu |= {"free": 70, "capability": (7, 0)}
    assert levels(torch_checks.gpus()) == ["problem"]


def test_the_folders_of_weights_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "weights"))
    *_, finding = torch_checks.weights()
    assert finding.found == f"{tmp_path / 'weights' / 'hub'} (not there yet)"
    monkeypatch.setattr(torch_checks.os, "access", lambda path, mode: False)
    assert levels(torch_checks.weights()) == ["warning", "warning"]


def test_the_private_step_is_that_of_the_loop():
    assert step_check.difference(torch.device("cpu")) < 1e-5
    assert levels(step_check.private_step()) == ["ok"]


def no_clipping(monkeypatch):
    monkeypatch.setattr(ClipPlan, "factors", lambda self, norms, bounds: torch.ones_like(norms))


def a_sum_one_percent_short(monkeypatch):
    end = clipped_sum.ClippedSum.end

    def without(self, *args, **kwargs):
        before = self.flat.clone()
        norms = end(self, *args, **kwargs)
        self.flat.copy_(before + 0.99 * (self.flat - before))
        return norms

    monkeypatch.setattr(clipped_sum.ClippedSum, "end", without)


@pytest.mark.parametrize("plant", [no_clipping, a_sum_one_percent_short])
def test_a_private_step_that_computes_something_else_is_a_problem(plant, monkeypatch):
    plant(monkeypatch)
    (finding,) = step_check.private_step()
    assert finding.level == "problem"
    assert "at most 0.0001 is rounding" in finding.found
