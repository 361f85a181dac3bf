"""``--ckpt_path last``: the newest checkpoint of a private run."""

import os
import shutil

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import ConfigurationError, DataError
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


def test_one_that_is_damaged_is_named(run):
    path = of_step(run, 9)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"step=9\.ckpt cannot be loaded"):
        last(run)


def test_weights_alone_are_passed_over_and_named_where_there_is_nothing_else(tmp_path):
    whole = ModelCheckpoint(tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    light = ModelCheckpoint(tmp_path / "checkpoints", filename="light", save_weights_only=True)
    trainer(tmp_path, privacy(), whole, light, enable_checkpointing=True).fit(Plain(), loader())
    assert last(tmp_path) == str(of_step(tmp_path, 9))
    for path in (tmp_path / "checkpoints").glob("step=*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"no checkpoint holds .*light\.ckpt.*save_weights_only: true"):
        last(tmp_path)


def test_where_nothing_stands_it_is_a_new_run_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="this is a new run"):
        assert last(tmp_path) is None
