"""Command lines that are shown: a shell reads them as they were meant."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dp_lightning.private_run.next_commands import after_a_run, command_line, resume_line, short


@pytest.fixture(autouse=True)
def _called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dpl"])
    monkeypatch.setattr("dp_lightning.private_run.next_commands._is_found", lambda name, path: True)


NAMES = ["plain", "with space", "it's", "$HOME;rm", "-dash", "tab\tand\nline", "tail\\", "caf\u00e9", "byte\udcff"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_the_arguments_that_were_meant(name):
    line = command_line("fit", "--config", name)
    assert line.isprintable()
    code = 'dpl() { printf "%s\\0" "$@"; }; ' + line
    shown = subprocess.run(
        ["bash", "-c", code], capture_output=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert [os.fsdecode(part) for part in shown.stdout.split(b"\0")[:-1]] == ["fit", "--config", name]


def test_paths_below_the_current_folder_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short(tmp_path / "a" / "b.ckpt") == short(Path("a/b.ckpt")) == "a/b.ckpt"
    assert short(tmp_path.parent / "other") == str(tmp_path.parent / "other")
    assert short(Path("-a")) == "./-a"


def test_the_program_is_called_as_it_was(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program = tmp_path / "bin" / "dpl"
    program.parent.mkdir()
    program.touch(mode=0o755)
    python = short(Path(sys.executable))
    for called, words in {
        str(program): ["dpl"],
        str(tmp_path / "venv" / "bin" / "dpl"): ["venv/bin/dpl"],
        "cli.py": [python, "cli.py"],
        "/x/dp_lightning/__main__.py": [python, "-m", "dp_lightning"],
        "/usr/bin/pytest": ["dpl"],
    }.items():
        monkeypatch.setattr(sys, "argv", [called])
        assert shlex.split(command_line("fit")) == [*words, "fit"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert command_line("fit") == "bin/dpl fit"


def test_a_run_of_a_trainer_of_ones_own_has_no_command(tmp_path):
    assert str(tmp_path / "a.ckpt") in resume_line(tmp_path, tmp_path / "a.ckpt")
    assert "dpl" not in resume_line(tmp_path, tmp_path / "a.ckpt").replace(str(tmp_path), "")
    (tmp_path / "config.yaml").touch()
    words = shlex.split(resume_line(tmp_path, tmp_path / "a.ckpt"))
    assert words[-5:] == ["fit", "--config", str(tmp_path / "config.yaml"), "--ckpt_path", str(tmp_path / "a.ckpt")]


def test_a_run_with_steps_left_can_be_resumed_and_another_cannot(tmp_path):
    def commands(resume, has_test_set=True):
        lines = after_a_run(tmp_path, tmp_path / "a.ckpt", has_test_set=has_test_set, resume=resume)
        return [shlex.split(line)[1] for _, line in lines]

    assert commands(None) == ["test", "predict", "export", "report", "verify"]
    assert commands([]) == [*commands(None), "fit"]
    assert commands(None, has_test_set=False) == ["validate", *commands(None)[1:]]
