"""Signals before the first step, and which checkpoint a SLURM job goes on from."""

import gc
import json
import os
import signal
import weakref
import zipfile

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from plain_run import Plain, loader, parameters_after, privacy, trainer
from torch.utils.data import DataLoader

from dp_lightning.callbacks import Interruption
from dp_lightning.commands.resume import checkpoint_to_resume


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return DataLoader(loader().dataset, batch_size=30)


class Signal(Callback):
    def on_validation_start(self, trainer, pl_module):
        if trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_the_sanity_check_stops_after_the_first_step(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, privacy(), Signal(), Interruption())
    with pytest.raises(SystemExit) as stop:
        run.fit(Validated(), loader())
    assert stop.value.code == 143
    assert (tmp_path / "checkpoints" / "interrupted-step=1.ckpt").is_file()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_has_ended_leaves_signals_as_they_were_and_is_freed(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = trainer(tmp_path, privacy(), Interruption())
    run.fit(Plain(), loader())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    run = weakref.ref(run)
    gc.collect()
    assert run() is None


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
    assert checkpoint_to_resume(now, None) is None
    (tmp_path / ".dpl_slurm_job_7.json").write_text(json.dumps({"folder": str(shared), "run": run}))
    assert checkpoint_to_resume(now, None) == checkpoint_to_resume(now, str(theirs)) == str(mine)
    mine.unlink()
    with zipfile.ZipFile(shared / "foreign.ckpt", "w") as foreign:
        foreign.writestr("notes.txt", "not a checkpoint")
    assert checkpoint_to_resume(now, None) is None
    assert checkpoint_to_resume(now, str(theirs)) == str(theirs)
