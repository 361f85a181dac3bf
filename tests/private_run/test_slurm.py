"""A SLURM job that is put back into the queue finds its run."""

import json
import os
import stat

import pytest
from plain_run import trainer

from dp_lightning.errors import DataError
from dp_lightning.private_run.slurm import earlier_start, leave_mark, requeue, slurm_job


@pytest.fixture
def job(monkeypatch):
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    return "31"


def test_a_task_of_an_array_has_the_id_of_both(job, monkeypatch):
    assert slurm_job() == "31"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "30")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert slurm_job() == "30_4"


def test_the_next_start_finds_the_folders_and_the_run(tmp_path, job, monkeypatch):
    run = trainer(tmp_path)
    assert earlier_start(run) is None
    leave_mark(run, run="abc", checkpoints=tmp_path / "checkpoints", log=tmp_path / "log")
    assert earlier_start(trainer(tmp_path)) == ([tmp_path / "checkpoints", tmp_path / "log"], "abc")
    monkeypatch.setenv("SLURM_JOB_ID", "32")  # another job in the same folder
    assert earlier_start(run) is None


def test_outside_of_slurm_nothing_is_written(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    run = trainer(tmp_path)
    leave_mark(run, run="abc", checkpoints=tmp_path, log=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert earlier_start(run) is None


@pytest.mark.parametrize("content", ["[]", "{}", json.dumps({"folder": "x"}), json.dumps({"folder": 1, "run": "abc"})])
def test_a_mark_that_names_no_run_is_refused_by_its_path(tmp_path, job, content):
    mark = tmp_path / ".dpl_slurm_job_31.json"
    mark.write_text(content)
    with pytest.raises(DataError, match=r"\.dpl_slurm_job_31\.json does not name .* Remove it"):
        earlier_start(trainer(tmp_path))


def scontrol(folder, text):
    command = folder / "scontrol"
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)


def test_the_job_is_put_back_into_the_queue(tmp_path, job, monkeypatch):
    scontrol(tmp_path, f'echo "$@" > {tmp_path / "called"}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    requeue()
    assert (tmp_path / "called").read_text() == "requeue 31\n"


@pytest.mark.parametrize("fails", ["echo 'access denied' >&2; exit 1", None])
def test_a_job_that_cannot_be_is_named(tmp_path, job, monkeypatch, fails):
    if fails:
        scontrol(tmp_path, fails)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if fails else str(tmp_path))
    with pytest.warns(UserWarning, match="Job 31 could not be put back .*(access denied|No such file).* by hand"):
        requeue()
