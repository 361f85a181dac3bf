"""Checkpoints are whole or absent."""

import enum
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from started_ranks import run_on_ranks

from dp_lightning.errors import DataError
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


def save(path, value, size=1000):
    PrivateCheckpointIO().save_checkpoint({"weights": torch.full((size,), float(value)), "step": value}, path)
    return path


def load(path):
    return PrivateCheckpointIO().load_checkpoint(path)


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path):
    told = []
    path = tmp_path / "below" / "one.ckpt"
    PrivateCheckpointIO(lambda checkpoint, folder: told.append(folder)).save_checkpoint(
        {"weights": torch.arange(5)}, path
    )
    assert torch.equal(load(path)["weights"], torch.arange(5))
    assert told == [path.parent]
    assert [file.name for file in path.parent.iterdir()] == ["one.ckpt"]


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Runs()}, "foreign.ckpt")
    with pytest.raises(DataError, match=r"foreign\.ckpt cannot be loaded .*pass weights_only=False with ckpt_path"):
        load("foreign.ckpt")
    assert not Path("ran").exists()


class Kind(enum.Enum):
    SMALL = 1


def test_code_is_run_where_that_is_asked_for(tmp_path):
    torch.save({"weights": Kind.SMALL}, tmp_path / "own.ckpt")
    assert PrivateCheckpointIO().load_checkpoint(tmp_path / "own.ckpt", weights_only=False) == {"weights": Kind.SMALL}


def test_a_truncated_file_and_content_of_another_form_are_refused_by_name(tmp_path):
    content = save(tmp_path / "last.ckpt", 3).read_bytes()
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "last.ckpt").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"last\.ckpt cannot be loaded"):
            load(tmp_path / "last.ckpt")
    torch.save([1], tmp_path / "last.ckpt")
    with pytest.raises(DataError, match="is no checkpoint: it holds a list"):
        load(tmp_path / "last.ckpt")


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    path = save(tmp_path / "one.ckpt", 1)
    (tmp_path / ".one.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"one.ckpt cannot be written.*Earlier checkpoints are as they were"):
        save(path, 2)
    assert load(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"]


def kill_writers(folder, kills):
    """Kill children that write checkpoints without pause, and read what each of them has left."""
    draw = random.Random(0)
    for number in range(kills):
        child = os.fork()
        while child == 0:
            number += 1  # each of the files comes first now and then
            save(folder / f"{number % 3}.ckpt", number, size=250_000)
        time.sleep(draw.uniform(0.001, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in folder.glob("*.ckpt"):
            checkpoint = load(path)
            assert torch.equal(checkpoint["weights"], torch.full((250_000,), float(checkpoint["step"])))
    assert len(list(folder.glob("*.ckpt"))) == 3


def test_a_process_killed_while_it_writes_leaves_whole_checkpoints(tmp_path):
    ended = run_on_ranks(kill_writers, tmp_path, 1, tmp_path, 20)
    assert ended.codes == [0], ended.stderr
