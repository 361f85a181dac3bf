"""Checkpoints are whole or absent."""

import enum
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

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


def test_a_truncated_file_is_refused_by_name(tmp_path):
    content = save(tmp_path / "last.ckpt", 3).read_bytes()
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "last.ckpt").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"last\.ckpt cannot be loaded"):
            load(tmp_path / "last.ckpt")


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    path = save(tmp_path / "one.ckpt", 1)
    (tmp_path / ".one.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"one.ckpt cannot be written.*Earlier checkpoints are as they were"):
        save(path, 2)
    assert load(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"]


def test_a_process_killed_while_it_writes_leaves_whole_checkpoints(tmp_path):
    draw = random.Random(0)
    for number in range(10):
        child = os.fork()
        while child == 0:
            number += 1  # each of the files comes first now and then
            save(tmp_path / f"{number % 3}.ckpt", number, size=250_000)
        time.sleep(draw.uniform(0.005, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in tmp_path.glob("*.ckpt"):
            checkpoint = load(path)
            assert torch.equal(checkpoint["weights"], torch.full((250_000,), float(checkpoint["step"])))
    assert list(tmp_path.glob("*.ckpt"))
