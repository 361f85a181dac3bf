"""Command lines that are shown: a shell reads them as they were meant."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.private_run.next_commands import after_a_run, command_line, resume_line, short


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


@pytest.mark.parametrize("has_test_set", [True, False])
def test_a_run_with_steps_left_can_be_resumed_and_another_cannot(tmp_path, has_test_set):
    class Tested(Plain):
        def test_dataloader(self):
            return loader()

    def commands(ended):
        lines = after_a_run(run, tmp_path, ended=ended)
        return [shlex.split(line)[1] for _, line in lines]

    run = trainer(tmp_path, privacy(), ModelCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    assert commands(ended=False) == []
    run.fit(Tested() if has_test_set else Plain(), loader())
    assert commands(ended=True) == ["test" if has_test_set else "validate", "predict", "export", "report", "verify"]
    assert commands(ended=False) == [*commands(ended=True), "fit"]
