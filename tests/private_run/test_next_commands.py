"""Command lines that are shown: a shell reads them as they were meant."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from dp_lightning.private_run.next_commands import command_line, resume_line, short


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)


def test_paths_below_the_current_folder_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short(tmp_path / "a" / "b.ckpt") == short(Path("a/b.ckpt")) == "a/b.ckpt"
    assert short(tmp_path.parent / "other") == str(tmp_path.parent / "other")


def test_a_program_that_a_shell_does_not_find_is_called_as_a_module(monkeypatch):
    assert shlex.split(command_line("fit", "it's")) == ["dpl", "fit", "it's"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert shlex.split(command_line("fit")) == [sys.executable, "-m", "dp_lightning", "fit"]


def test_a_run_of_a_trainer_of_ones_own_has_no_command(tmp_path):
    assert str(tmp_path / "a.ckpt") in resume_line(tmp_path, tmp_path / "a.ckpt")
    assert "dpl" not in resume_line(tmp_path, tmp_path / "a.ckpt").replace(str(tmp_path), "")
    (tmp_path / "config.yaml").touch()
    words = shlex.split(resume_line(tmp_path, tmp_path / "a.ckpt"))
    assert words[-5:] == ["fit", "--config", str(tmp_path / "config.yaml"), "--ckpt_path", str(tmp_path / "a.ckpt")]
