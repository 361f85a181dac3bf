"""``--ckpt_path last``: the run that was written to last, and its checkpoint with the most steps that loads."""

import os
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.journal import journals_in
from dp_lightning.private_run.latest_run import where_to_start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 9 steps with checkpoints after 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("whole")
    saved = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(folder, privacy(), saved, enable_checkpointing=True).fit(Plain(), loader())
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def last(folder):
    return where_to_start(trainer(folder), "last")


def of_step(folder, step):
    return folder / "checkpoints" / f"step={step}.ckpt"


def test_steps_decide_and_not_the_time_of_the_files(run):
    for seconds, path in enumerate(sorted((run / "checkpoints").glob("*.ckpt"), reverse=True)):
        os.utime(path, (seconds, seconds))
    assert last(run) == (str(of_step(run, 9)), None)


def not_a_checkpoint(path):
    torch.save({"weights": torch.zeros(3)}, path)


def code(path):
    torch.save({"weights": os.system}, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    place = content.index(torch.load(path, weights_only=True)["state_dict"]["net.0.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [not_a_checkpoint, code, cut, flip])
def test_one_that_does_not_load_is_passed_over_by_name(run, damage):
    damage(of_step(run, 9))
    with pytest.warns(UserWarning, match=r"Resuming from .*step=6.ckpt.*step=9.ckpt does not load: "):
        assert last(run) == (str(of_step(run, 6)), None)
    damage(of_step(run, 6))
    damage(of_step(run, 3))
    # Not with fresh weights by itself.
    with pytest.raises(ConfigurationError, match=r"step=3.ckpt does not load: .*move these files away"):
        last(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.warns(UserWarning, match="before its first checkpoint"):
        assert last(run) == (None, *journals_in(run))


def test_weights_alone_are_passed_over_by_the_setting_that_saved_them(tmp_path):
    whole = ModelCheckpoint(tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    light = ModelCheckpoint(tmp_path / "checkpoints", filename="light", save_weights_only=True)
    trainer(tmp_path, privacy(), whole, light, enable_checkpointing=True).fit(Plain(), loader())
    why = "light.ckpt does not load: it is not a checkpoint of a private run, .*save_weights_only: true"
    with pytest.warns(UserWarning, match=f"Resuming from .*step=9.ckpt.*{why}"):
        assert last(tmp_path) == (str(of_step(tmp_path, 9)), None)
    for path in (tmp_path / "checkpoints").glob("step=*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match=f"{why}.*set it to false"):
        last(tmp_path)


class Dies(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            raise RuntimeError("died")


def test_the_run_that_was_written_to_last_is_gone_on_with(run):
    with pytest.raises(RuntimeError, match="died"):
        trainer(run, privacy(), Dies()).fit(Plain(), loader())
    newest = max(journals_in(run), key=lambda path: path.stat().st_mtime)
    with pytest.warns(UserWarning, match="before its first checkpoint"):
        assert last(run) == (None, newest)
    newest.unlink()
    assert last(run) == (str(of_step(run, 9)), None)


def test_where_nothing_stands_it_is_a_new_run_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="this is a new run"):
        assert last(tmp_path) == (None, None)
    # One that was killed before its first step has spent nothing.
    trainer_of_a_start = trainer(tmp_path, privacy(), KilledAtTheStart())
    with pytest.raises(RuntimeError, match="killed"):
        trainer_of_a_start.fit(Plain(), loader())
    assert journals_in(tmp_path)
    with pytest.warns(UserWarning, match="this is a new run"):
        assert last(tmp_path) == (None, None)


class KilledAtTheStart(Callback):
    def on_train_start(self, *args):
        raise RuntimeError("killed")
