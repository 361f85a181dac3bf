"""Checkpoints are whole or absent."""

import enum
import os
import subprocess
from pathlib import Path

import pytest
import torch

from dp_lightning.errors import DataError
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

SCRIPT = Path(__file__).parent / "save_until_killed.py"


def save(path, value):
    PrivateCheckpointIO().save_checkpoint({"weights": torch.full((1000,), float(value)), "step": value}, path)
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
    with pytest.raises(DataError, match=r"foreign\.ckpt cannot be loaded .*weights_only=False"):
        load("foreign.ckpt")
    assert not Path("ran").exists()


def test_code_is_run_where_that_is_asked_for(tmp_path):
    torch.save({"weights": Kind.SMALL}, tmp_path / "own.ckpt")
    with pytest.raises(DataError, match="if it is your own, pass weights_only=False with ckpt_path"):
        load(tmp_path / "own.ckpt")
    assert PrivateCheckpointIO().load_checkpoint(tmp_path / "own.ckpt", weights_only=False) == {"weights": Kind.SMALL}


class Kind(enum.Enum):
    SMALL = 1


def test_a_truncated_file_is_refused_by_its_name(tmp_path):
    content = save(tmp_path / "last.ckpt", 3).read_bytes()
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "last.ckpt").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"last\.ckpt cannot be loaded"):
            load(tmp_path / "last.ckpt")


def test_content_of_another_form_is_refused(tmp_path):
    torch.save([1], tmp_path / "x.ckpt")
    with pytest.raises(DataError, match="is no checkpoint: it holds a list"):
        load(tmp_path / "x.ckpt")


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    path = save(tmp_path / "one.ckpt", 1)
    (tmp_path / ".one.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"one.ckpt cannot be written.*Earlier checkpoints are as they were"):
        save(path, 2)
    assert load(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"]


@pytest.mark.parametrize("folder", ["a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, folder):
    place = tmp_path / folder
    if folder == "a file":
        place.write_text("")
    else:
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            pytest.skip("this user may write everywhere")
    with pytest.raises(DataError, match=r"one.ckpt cannot be written"):
        save(place / "one.ckpt", 1)


@pytest.mark.parametrize("temporary", ["same", "other"])
def test_a_process_killed_while_it_writes_leaves_whole_checkpoints(tmp_path, warm_python, temporary):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if temporary == "other" and not os.path.isdir("/dev/shm"):
        pytest.skip("there is no second file system")
    shown = subprocess.run(
        [warm_python, SCRIPT, folder, "50"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path) if temporary == "same" else "/dev/shm"},
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert shown.stdout.strip() == "3"
