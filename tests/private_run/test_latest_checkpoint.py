"""``--ckpt_path last``: the newest checkpoint of a private run that loads."""

import os
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.resume import latest_checkpoint


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
    return latest_checkpoint(trainer(folder))


def of_step(folder, step):
    return folder / "checkpoints" / f"step={step}.ckpt"


def test_it_is_the_newest_file(run):
    assert last(run) == str(of_step(run, 9))
    os.utime(of_step(run, 3), (2e9, 2e9))
    assert last(run) == str(of_step(run, 3))


def not_a_checkpoint(path):
    torch.save({"weights": torch.zeros(3)}, path)


def code(path):
    torch.save({"weights": os.system}, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [not_a_checkpoint, code, cut])
def test_one_that_does_not_load_is_passed_over_by_name(run, damage):
    damage(of_step(run, 9))
    with pytest.warns(UserWarning, match=r"'last' is .*step=6.ckpt.*step=9.ckpt does not load: "):
        assert last(run) == str(of_step(run, 6))
    damage(of_step(run, 6))
    damage(of_step(run, 3))
    # Not with fresh weights by itself.
    with pytest.raises(ConfigurationError, match=r"no checkpoint can be loaded.*step=3.ckpt does not load: "):
        last(run)


def test_weights_alone_are_passed_over_by_the_setting_that_saved_them(tmp_path):
    whole = ModelCheckpoint(tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    light = ModelCheckpoint(tmp_path / "checkpoints", filename="light", save_weights_only=True)
    trainer(tmp_path, privacy(), whole, light, enable_checkpointing=True).fit(Plain(), loader())
    why = "light.ckpt does not load: .*is not a checkpoint of a private run, .*save_weights_only: true"
    with pytest.warns(UserWarning, match=f"is .*step=9.ckpt.*{why}"):
        assert last(tmp_path) == str(of_step(tmp_path, 9))
    for path in (tmp_path / "checkpoints").glob("step=*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match=why):
        last(tmp_path)


def test_where_nothing_stands_it_is_a_new_run_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="this is a new run"):
        assert last(tmp_path) is None
