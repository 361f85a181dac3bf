"""Signals and crashes: a run ends in order, comes back, and never says less than it spent."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from started_runs import Nodes, statement, steps_in_journals

from dp_lightning.privacy.journal import read_journal, run_of

ROOT = Path(__file__).parents[2]
# Long enough that a signal comes before the end.
EPOCHS = 14
STEPS = EPOCHS * 3  # round(1437 / 512) in each


def start(python, folder, *arguments, devices=1):
    command = [python, str(ROOT / "cli.py"), "fit", "--config", str(ROOT / "configs" / "digits.yaml")]
    settings = ["--trainer.accelerator", "cpu", "--trainer.devices", str(devices), "--trainer.max_epochs", str(EPOCHS)]
    quick = ["--model.channels", "4", "--trainer.enable_progress_bar", "false", "--privacy.accountant", "rdp"]
    return Nodes(folder, [[*command, *settings, *quick, "--trainer.default_root_dir", str(folder), *arguments]], [{}])


@pytest.mark.slow  # two runs of up to two processes
def test_a_signal_loses_no_step_and_the_run_goes_on(tmp_path, warm_python):
    run = start(warm_python, tmp_path, devices=2)
    run.wait_for_steps(7)
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.end() == [143], run.said()
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/interrupted-step=*.ckpt")
    taken = steps_in_journals(tmp_path)
    assert checkpoint.name == f"interrupted-step={taken}.ckpt"
    assert statement(tmp_path)["num_steps"] == taken < STEPS
    assert run.said().splitlines()[-1] == f"Stopped after step {taken}. Resume with ckpt_path {checkpoint}"
    # On one device, whatever it was before.
    run = start(warm_python, tmp_path, "--ckpt_path", "last")
    assert run.end() == [0], run.said()
    found = statement(tmp_path)
    assert found["num_steps"] == found["num_steps_planned"] == STEPS
    assert found["epsilon"]["rdp"] <= 3.0


def processes_of(folder):
    """Numbers of the processes with this folder among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def newest_step(folder, version):
    checkpoints = folder.glob(f"lightning_logs/{version}/checkpoints/*.ckpt")
    return max(int(path.stem.rpartition("=")[2]) for path in checkpoints)


@pytest.mark.slow  # two runs
def test_a_rank_that_dies_ends_the_run_and_its_lost_steps_count_as_spent(tmp_path, warm_python):
    saving = ["--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.every_n_epochs", "4"]
    run = start(warm_python, tmp_path, *saving, devices=2)
    # The first checkpoint stands after step 12, the next one after step 24.
    run.wait_for_steps(14)
    (rank,) = set(processes_of(tmp_path)) - {run.processes[0].pid}
    os.kill(rank, signal.SIGKILL)  # the executable, which takes the process that it stands for along
    assert run.end() != [0]  # and in time: a collective would wait much longer
    # The last line of the run's own folder may be of a step that was killed before it was released.
    (beside,) = tmp_path.glob("lightning_logs/version_0/checkpoints/privacy_journal_*.jsonl")
    taken = len(read_journal(beside, run_of(beside)))
    saved = newest_step(tmp_path, "version_0")
    assert saved < taken
    run = start(warm_python, tmp_path, "--ckpt_path", "last")
    assert run.end() == [0], run.said()
    found = statement(tmp_path)
    assert found["num_steps"] == STEPS
    assert found["epsilon"]["rdp"] <= 3.0
    # The optimizer has taken fewer steps than were spent.
    assert newest_step(tmp_path, "version_1") == STEPS - (taken - saved)
