"""The journal of steps: nothing is released that it does not hold, and nothing that it holds is lost."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dp_lightning.errors import DataError
from dp_lightning.privacy import Ledger, PrivacyPlan, PrivateStep
from dp_lightning.privacy.journal import Journal

STEP = {"noise_multiplier": 1.5, "sample_rate": 0.25}


def journal(folder, steps=0):
    found = Journal("run")
    found.add_folder(folder, Ledger())
    for _ in range(steps):
        found.record(**STEP)
    return found


def read(folder):
    return Journal("run").read(folder)


def test_steps_are_read_as_they_were_recorded(tmp_path):
    first = journal(tmp_path, 3)
    first.record(noise_multiplier=0.1 + 0.2, sample_rate=1 / 3)
    assert read(tmp_path).runs == ((1.5, 0.25, 3), (0.1 + 0.2, 1 / 3, 1))
    assert Journal("another").read(tmp_path) is None


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_a_line_cut_short_counts_as_a_step_and_later_ones_stay_whole(tmp_path, cut):
    path = journal(tmp_path, 3).path(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal("run")
    assert again.read(tmp_path).runs == ((1.5, 0.25, 3),)
    again.record(noise_multiplier=2.0, sample_rate=0.5)
    assert read(tmp_path).runs == ((1.5, 0.25, 3), (2.0, 0.5, 1))


@pytest.mark.parametrize("damage", [b"\0" * 30, b"nonsense", b'{"noise_multiplier": "x"}', b"[1, 2]", b"5"])
def test_a_damaged_line_counts_as_a_step(tmp_path, damage):
    path = journal(tmp_path, 4).path(tmp_path)
    lines = path.read_bytes().splitlines()
    for place in (0, 2, 3):
        path.write_bytes(b"\n".join([*lines[:place], damage, *lines[place + 1 :], b""]))
        assert read(tmp_path).runs == ((1.5, 0.25, 4),)
    path.write_bytes(damage + b"\n")
    with pytest.raises(DataError, match="unknown how many steps"):
        read(tmp_path)


def test_every_folder_gets_every_step(tmp_path):
    first, second, third = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    ledger = Ledger()
    one = Journal("run")
    one.add_folder(first, ledger)
    for folder in (None, second, third):
        if folder is not None:
            one.add_folder(folder, ledger)
        one.record(**STEP)
        ledger.record(**STEP)
    assert [read(folder).num_steps for folder in (first, second, third)] == [3, 3, 3]
    # Who goes on from one of them tells the others.
    again = Journal("run")
    again.read(second)
    again.record(**STEP)
    assert [read(folder).num_steps for folder in (first, second, third)] == [4, 4, 4]


def test_a_journal_that_stands_there_is_never_shortened(tmp_path):
    """Folders that were copied, so that they do not know of each other."""
    first, second = tmp_path / "a", tmp_path / "b"
    journal(first, 5)
    journal(second, 2)
    short, ledger = Journal("run"), Ledger()
    ledger.record(**STEP)
    short.add_folder(first, ledger)
    # Whether the one step is among the five cannot be told where it has no id: never fewer.
    assert read(first).num_steps >= 5
    for _ in range(3):
        ledger.record(**STEP)
        ledger.record(noise_multiplier=2.0, sample_rate=0.5)
    longer = Journal("run")
    longer.add_folder(second, ledger)
    assert sorted(read(second).runs) == [(1.5, 0.25, 4), (2.0, 0.5, 3)]


def test_a_step_that_only_a_named_journal_holds_counts(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    one, ledger = Journal("run"), Ledger()
    one.add_folder(first, ledger)
    one.add_folder(second, ledger)
    one.record(**STEP)
    # Killed between the two files, or gone on from a copy of one of them.
    path = one.path(first)
    line = b'{"step": "a", "noise_multiplier": 1.5, "sample_rate": 0.25}\n'
    path.write_bytes(path.read_bytes() + line)
    assert read(first).num_steps == read(second).num_steps == 2
    # Each of them holds one that the other lacks.
    other = one.path(second)
    other.write_bytes(other.read_bytes() + line.replace(b'"a"', b'"b"'))
    assert read(first).num_steps == read(second).num_steps == 3
    # From now on each of them holds all, so that the other may be lost.
    kept = path.read_bytes()
    path.unlink()
    assert read(second).num_steps == 3
    other.unlink()
    path.write_bytes(kept)
    assert read(first).num_steps == 3


def test_a_step_counts_however_far_its_journal_is(tmp_path):
    first, second, third = (journal(tmp_path / name, 1) for name in "abc")
    for near, far in ((first, tmp_path / "b"), (second, tmp_path / "c")):
        path = near.path(tmp_path / ("a" if near is first else "b"))
        path.write_bytes(path.read_bytes() + b'{"folder": "%s"}\n' % str(far).encode())
    assert read(tmp_path / "a").num_steps == 3
    assert third.path(tmp_path / "c").is_file()


def test_a_journal_that_stood_there_learns_of_the_others(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    journal(first, 2)
    one = journal(second, 1)
    one.add_folder(first, Ledger())
    # Killed between the two files.
    path = one.path(second)
    path.write_bytes(path.read_bytes() + b'{"step": "a", "noise_multiplier": 1.5, "sample_rate": 0.25}\n')
    assert read(first).num_steps == 4


@pytest.mark.parametrize("cut", [2, 10, 40])
def test_a_step_that_one_journal_holds_cut_short_is_the_same_step_in_all(tmp_path, cut):
    first, second = tmp_path / "a", tmp_path / "b"
    one = journal(first, 2)
    one.add_folder(second, Ledger())
    # Killed while it wrote to the first file.
    step = b'{"step": "a", "noise_multiplier": 1.5, "sample_rate": 0.25}\n'
    one.path(first).write_bytes(one.path(first).read_bytes() + step[:-cut])
    for _ in range(2):
        assert read(second).num_steps == read(first).num_steps == 3
    one.path(first).unlink()
    assert read(second).num_steps == 3


def private_step(folder):
    plan = PrivacyPlan(num_train=10, expected_batch_size=5, num_steps=4, noise_multiplier=1.0, delta=1e-3)
    steps, model = journal(folder), nn.Linear(3, 1)
    data = TensorDataset(torch.randn(10, 3))
    return steps, PrivateStep(model, lambda batch: model(batch[0]).sum(), data, plan=plan, journal=steps)


def take(private):
    for batch in private.batches():
        private.accumulate(batch)
    private.release()


def test_a_release_is_in_the_journal(tmp_path):
    _, private = private_step(tmp_path)
    for _ in range(2):
        take(private)
    assert read(tmp_path).runs == private.ledger.runs == ((1.0, 0.5, 2),)


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_step_that_cannot_be_recorded_is_not_released(tmp_path, fault):
    steps, private = private_step(tmp_path)
    take(private)
    before = [parameter.grad.clone() for parameter in private.parameters.values()]
    path = steps.path(tmp_path)
    path.unlink()
    if fault == "full":
        path.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot be written.*must not be taken"):
        take(private)
    assert private.ledger.num_steps == 1
    assert all(torch.equal(p.grad, old) for p, old in zip(private.parameters.values(), before, strict=True))
    with pytest.raises(DataError, match="cannot be written"):
        steps.add_folder(path / "below a file", private.ledger)


def test_two_processes_do_not_record_the_same_run(tmp_path):
    first = journal(tmp_path, 2)
    second = Journal("run")
    second.read(tmp_path)
    second.record(**STEP)
    with pytest.raises(DataError, match="changed by another process"):
        first.record(**STEP)
    second.record(**STEP)
    assert read(tmp_path).num_steps == 4
