"""Signals stop a run between two steps."""

import gc
import os
import signal
import weakref

import pytest
from lightning.pytorch.callbacks import Callback
from plain_run import Plain, loader, privacy, trainer, written

from dp_lightning.callbacks import StopOnSignal


class Signal(Callback):
    """Comes in a step."""

    def __init__(self, number, step=1):
        self.number, self.step = number, step

    def on_before_optimizer_step(self, trainer, *args):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_after_the_next_step(tmp_path, number, code, capsys):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop:
        trainer(tmp_path, callback := privacy(), Signal(number), StopOnSignal()).fit(Plain(), loader())
    assert stop.value.code == code
    assert signal.getsignal(number) == before
    (saved,) = (callback.private_run.folder / "checkpoints").glob("*.ckpt")
    # The step was released already; the ranks learn of the signal at the next one.
    assert saved.name == "interrupted-step=3.ckpt"
    assert written(callback)["num_steps"] == 3
    assert capsys.readouterr().out.splitlines()[-1] == f"Stopped after step 3. Resume with ckpt_path {saved}"


def test_a_run_that_has_ended_leaves_signals_as_they_were_and_is_freed(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = trainer(tmp_path, privacy(), StopOnSignal())
    run.fit(Plain(), loader())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    run = weakref.ref(run)
    gc.collect()
    assert run() is None


class Twice(Callback):
    def on_train_batch_end(self, *args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_ends_at_once_with_its_exit_code(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run = trainer(tmp_path, callback := privacy(), Twice(), StopOnSignal())
    with pytest.raises(SystemExit) as stop:
        run.fit(Plain(), loader())
    assert stop.value.code == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert written(callback)["num_steps"] == 1
    assert not list(tmp_path.rglob("*.ckpt"))


def test_lightning_requeues_a_job_of_slurm_between_two_steps_and_resumes_it(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "called"}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"JOB_ID": "31", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NODEID", "0")
    first, again = privacy(), privacy()
    with pytest.raises(SystemExit) as stop:
        trainer(tmp_path, first, Signal(signal.SIGUSR1), StopOnSignal(), strategy="ddp").fit(Plain(), loader())
    assert stop.value.code == 143
    assert (tmp_path / "called").read_text() == "requeue 31\n"
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    trainer(tmp_path, again, StopOnSignal(), strategy="ddp").fit(Plain(), loader())
    assert again.history.record.run == first.history.record.run
    assert again.ledger.runs == ((1.0, again.plan.sample_rate, 9),)
