"""The journal of steps: nothing is released that it does not hold, and nothing that it holds is lost."""

import pytest
import torch
from small_steps import plan_of, released
from torch import nn
from torch.utils.data import TensorDataset

from dp_lightning.errors import DataError
from dp_lightning.privacy import Ledger, PrivateStep
from dp_lightning.privacy.journal import Journal, journal_of, read_journal, spent_in, up_to
from dp_lightning.privacy.record import RunRecord

STEP = {"noise_multiplier": 1.5, "sample_rate": 0.25}


def journal(folder, steps=0):
    found = Journal("run")
    found.add_folder(folder)
    for _ in range(steps):
        found.record(**STEP)
    return found


def read(folder):
    found = Journal("run")
    found.add_folder(folder)
    return found.ledger


@pytest.mark.parametrize("cut", [1, 10])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_line_cut_short_is_of_a_step_that_was_not_released(tmp_path, cut, resumed):
    """Its process was stopped before the line was on disk; whole but for its end, it is a step."""
    path = journal(tmp_path, 3).path(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    again = journal(tmp_path)
    whole = 3 if cut == 1 else 2
    assert again.ledger.runs == ((1.5, 0.25, whole),)
    if resumed:
        again = journal(tmp_path)
    again.record(noise_multiplier=2.0, sample_rate=0.5)
    assert read(tmp_path).runs == ((1.5, 0.25, whole), (2.0, 0.5, 1))


def test_steps_of_a_ledger_that_no_file_holds_are_written(tmp_path):
    ledger = Ledger()
    for _ in range(3):
        ledger.record(**STEP)
    one = Journal("run")
    one.add_folder(tmp_path, ledger)
    assert read(tmp_path).num_steps == 3
    one.add_folder(tmp_path / "b", ledger)
    assert read(tmp_path / "b").num_steps == 3


def test_a_step_that_one_of_two_files_holds_counts(tmp_path):
    """As when a process was killed between the two files, or a folder was copied."""
    first, second = tmp_path / "a", tmp_path / "b"
    one = journal(first, 2)
    one.add_folder(second)
    before = one.path(second).read_bytes()
    one.record(**STEP)
    one.path(second).write_bytes(before)
    for near, far in ((first, second), (second, first)):
        one.path(second).write_bytes(before)
        again = journal(near)
        again.add_folder(far)
        again.record(**STEP)
        assert again.ledger.num_steps == read(first).num_steps == read(second).num_steps
        assert again.path(first).read_bytes() == again.path(second).read_bytes()
    assert read(first).num_steps == 5


def test_a_folder_of_another_branch_is_refused(tmp_path):
    """Two fits resumed from one checkpoint: what one of them has spent is no part of the other."""
    first, second = tmp_path / "a", tmp_path / "b"
    one = journal(first, 2)
    one.add_folder(second)
    journal(first).record(**STEP)
    other = journal(second)
    other.record(**STEP)
    for _ in range(2):
        with pytest.raises(DataError, match=r"steps of another fit.*Choose another folder"):
            other.add_folder(first)
        other.record(**STEP)
    assert (read(first).num_steps, read(second).num_steps) == (3, 5)


def private_step(folder):
    steps, model, data = journal(folder), nn.Linear(3, 1), TensorDataset(torch.randn(10, 3))
    plan, record = plan_of(10, expected_batch_size=5, noise_multiplier=1.0), RunRecord(journal=steps)
    return steps, PrivateStep(model, lambda batch: model(batch[0]).sum(), data, plan=plan, record=record)


def test_a_release_is_in_the_journal(tmp_path):
    _, private = private_step(tmp_path)
    for _ in range(2):
        released(private)
    assert read(tmp_path).runs == private.record.ledger.runs == ((1.0, 0.5, 2),)


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_step_that_cannot_be_recorded_is_not_released(tmp_path, fault):
    steps, private = private_step(tmp_path)
    released(private)
    before = [parameter.grad.clone() for parameter in private.parameters.values()]
    path = steps.path(tmp_path)
    path.unlink()
    if fault == "full":
        path.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written.*must not be taken"):
        released(private)
    assert private.record.ledger.num_steps == 1
    assert all(torch.equal(p.grad, old) for p, old in zip(private.parameters.values(), before, strict=True))
    path.unlink(missing_ok=True)
    path.touch()
    with pytest.raises(DataError, match="cannot be written"):
        Journal("run").add_folder(path / "below a file", private.record.ledger)


def test_a_file_that_could_not_be_written_gets_the_step_later(tmp_path):
    one = journal(tmp_path / "a", 1)
    one.add_folder(tmp_path / "b")
    path = one.path(tmp_path / "b")
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(DataError, match="cannot be written"):
        one.record(**STEP)
    path.write_bytes(kept)
    one.record(**STEP)
    assert read(tmp_path / "a").num_steps == read(tmp_path / "b").num_steps == 3


def test_two_processes_do_not_record_the_same_run(tmp_path):
    first = journal(tmp_path, 2)
    second = journal(tmp_path)
    second.record(**STEP)
    with pytest.raises(DataError, match="changed by another process"):
        first.record(**STEP)
    second.record(**STEP)
    assert read(tmp_path).num_steps == 4


EDITS = {
    "noise multiplier of the last step": lambda lines: [*lines[:-1], lines[-1].replace(b"1.5", b"9.5")],
    "sample rate": lambda lines: [lines[0], lines[1].replace(b"0.25", b"0.01"), *lines[2:]],
    "the same step twice": lambda lines: [lines[0], lines[0], *lines[2:]],
    "a line less": lambda lines: [lines[0], *lines[2:]],
    "a line that cannot be read": lambda lines: [lines[0], b"?", *lines[2:]],
}


@pytest.mark.parametrize("name", EDITS)
def test_a_journal_that_was_edited_is_refused(tmp_path, name):
    path = journal(tmp_path, 5).path(tmp_path)
    lines = path.read_bytes().splitlines()
    edited = EDITS[name](lines)
    assert edited != lines
    path.write_bytes(b"\n".join([*edited, b""]))
    with pytest.raises(DataError, match="is not as it was written"):
        read(tmp_path)


def test_the_head_stands_for_all_steps_up_to_it(tmp_path):
    one = journal(tmp_path, 3)
    head = one.head
    one.record(noise_multiplier=2.0, sample_rate=0.5)
    steps = read_journal(one.path(tmp_path), "run")
    assert list(steps)[-1] == one.head != head
    assert spent_in(up_to(head, steps).values()) == {(1.5, 0.25): 3}
    assert up_to("", steps) == up_to("another", steps) == {}
    assert journal_of(steps) == one.path(tmp_path).read_bytes()
