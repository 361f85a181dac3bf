"""Signals before the first step, and which checkpoint a SLURM job resumes from."""

import gc
import json
import os
import signal
import weakref
import zipfile

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from plain_run import Plain, Stop, held_out, loader, parameters_after, privacy, trainer

from dp_lightning.callbacks import RunRecord, StopOnSignal
from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.latest_run import where_to_start


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return held_out(60)


class Logged(Validated):
    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.5)


class Signal(Callback):
    def on_validation_start(self, trainer, pl_module):
        if trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_the_sanity_check_stops_after_the_first_step(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, privacy(), Signal(), StopOnSignal())
    with pytest.raises(SystemExit) as stop:
        run.fit(Validated(), loader())
    assert stop.value.code == 143
    assert (tmp_path / "checkpoints" / "interrupted-step=1.ckpt").is_file()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_has_ended_leaves_signals_as_they_were_and_is_freed(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = trainer(tmp_path, privacy(), StopOnSignal())
    run.fit(Plain(), loader())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    run = weakref.ref(run)
    gc.collect()
    assert run() is None


class SignalAtTheEnd(Callback):
    """When the last step is taken and its evaluation runs."""

    def __init__(self, number):
        self.number = number

    def on_validation_start(self, trainer, pl_module):
        if trainer.global_step == 9:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["evaluation", "statement"])
def test_a_signal_behind_the_last_step_leaves_a_whole_run_and_its_exit_code(
    tmp_path, monkeypatch, number, code, moment
):
    before, others = signal.getsignal(number), [SignalAtTheEnd(number)]
    if moment == "statement":
        others, replace = [], os.replace

        def signalled(source, target):
            if target.name == "privacy_statement.json":
                os.kill(os.getpid(), number)
            replace(source, target)

        monkeypatch.setattr(os, "replace", signalled)
    run = trainer(tmp_path, privacy(), *others, RunRecord(), StopOnSignal())
    with pytest.raises(SystemExit) as stop:
        run.fit(Logged(), loader())
    assert stop.value.code == code
    assert signal.getsignal(number) == before
    assert json.loads((tmp_path / "privacy_statement.json").read_text())["num_steps"] == 9
    assert json.loads((tmp_path / "result.json").read_text())["completed"] is True


class Twice(Callback):
    def on_train_batch_end(self, *args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_ends_at_once_with_its_exit_code(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    run = trainer(tmp_path, privacy(), Twice(), StopOnSignal())
    with pytest.raises(SystemExit) as stop:
        run.fit(Plain(), loader())
    assert stop.value.code == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert json.loads((tmp_path / "privacy_statement.json").read_text())["num_steps"] == 1
    assert not (tmp_path / "checkpoints").exists()
    assert "Stopped after step 1, without a checkpoint: the weights are lost" in capsys.readouterr().err


def test_a_step_that_a_second_ctrl_c_cuts_short_was_not_lost_before(tmp_path, capsys):
    class TwiceInTheLastStep(Callback):
        def on_before_optimizer_step(self, trainer, *args):
            if trainer.global_step == 4:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)

    saved = ModelCheckpoint(dirpath=tmp_path, filename="saved")
    run = trainer(tmp_path, privacy(), TwiceInTheLastStep(), saved, StopOnSignal(), enable_checkpointing=True)
    with pytest.raises(SystemExit):
        run.fit(Plain(), loader())
    told = capsys.readouterr().err
    assert "Stopped after step 5. To resume:" in told
    assert "saved.ckpt" in told


class Once(Callback):
    def on_train_start(self, *args):
        os.kill(os.getpid(), signal.SIGINT)


def test_steps_that_were_lost_before_are_told_beside_the_checkpoint_that_lacks_them(tmp_path, capsys):
    first = privacy()
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, first, Stop(2)).fit(Plain(), loader())
    second = privacy()
    second.history.left = next(tmp_path.glob("privacy_journal_*.jsonl"))
    with pytest.raises(SystemExit):
        trainer(tmp_path, second, Once(), StopOnSignal()).fit(Plain(), loader())
    told = capsys.readouterr().err
    assert "Stopped after step 3, 2 of which were lost before. To resume:" in told
    assert "interrupted-step=1.ckpt" in told


def checkpoints_of(folder, name):
    """One checkpoint of a run of its own; and the name of that run."""
    callback = privacy()
    saved = ModelCheckpoint(dirpath=folder, filename=name)
    parameters_after(folder, callback, saved, enable_checkpointing=True)
    return folder / f"{name}.ckpt", callback.run


def test_a_job_goes_on_from_its_own_run_whatever_else_was_asked(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    mine, run = checkpoints_of(shared, "mine")
    theirs, _ = checkpoints_of(shared, "theirs")
    os.utime(mine, (1, 1))  # the other one is newer
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    now = trainer(tmp_path)
    assert where_to_start(now, None).checkpoint is None
    (tmp_path / ".dpl_slurm_job_7.json").write_text(json.dumps({"folder": str(shared), "log": str(shared), "run": run}))
    assert where_to_start(now, None).checkpoint == where_to_start(now, str(theirs)).checkpoint == str(mine)
    mine.unlink()
    with zipfile.ZipFile(shared / "foreign.ckpt", "w") as foreign:
        foreign.writestr("notes.txt", "not a checkpoint")
    with pytest.raises(ConfigurationError, match=r"foreign.ckpt does not load"):
        where_to_start(now, None)
    (shared / "foreign.ckpt").unlink()
    # No checkpoint of its own is left: its steps stay counted.
    journal = shared / f"privacy_journal_{run}.jsonl"
    assert where_to_start(now, None) == where_to_start(now, str(theirs)) == (None, journal)
    journal.unlink()
    assert where_to_start(now, str(theirs)) == (str(theirs), None)
