"""The journal of steps: nothing is released that it does not hold, and nothing that it holds is lost."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dp_lightning.errors import DataError
from dp_lightning.privacy import Ledger, PrivacyPlan, PrivateStep
from dp_lightning.privacy.journal import Journal, Step, heads_of, read_journal, spent_in, up_to
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


def write_to(path, *, cut=0, nonce="a"):
    """One more step in this file alone, as by a process that was killed before it wrote to the others."""
    steps, _ = read_journal(path, "run")
    step = Step(**STEP, number=len(steps) + 1, after=heads_of(steps), nonce=nonce)
    line = json.dumps({"step": step.name("run"), **asdict(step)}).encode() + b"\n"
    path.write_bytes(path.read_bytes() + line[: len(line) - cut])


def test_steps_are_read_as_they_were_recorded(tmp_path):
    first = journal(tmp_path, 3)
    first.record(noise_multiplier=0.1 + 0.2, sample_rate=1 / 3)
    assert read(tmp_path).runs == ((1.5, 0.25, 3), (0.1 + 0.2, 1 / 3, 1))


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_a_line_cut_short_counts_as_a_step_and_later_ones_stay_whole(tmp_path, cut):
    path = journal(tmp_path, 3).path(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    again = journal(tmp_path)
    assert again.ledger.runs == ((1.5, 0.25, 3),)
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
    again = journal(second)
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
    write_to(path)
    assert read(first).num_steps == read(second).num_steps == 2
    # Each of them holds one that the other lacks.
    other = one.path(second)
    steps = path.read_bytes(), other.read_bytes()
    write_to(path, nonce="b")
    write_to(other, nonce="c")
    assert steps != (path.read_bytes(), other.read_bytes())
    assert read(first).num_steps == read(second).num_steps == 4
    # From now on each of them holds all, so that the other may be lost.
    kept = path.read_bytes()
    path.unlink()
    assert read(second).num_steps == 4
    other.unlink()
    path.write_bytes(kept)
    assert read(first).num_steps == 4


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
    one.add_folder(first)
    # Killed between the two files.
    write_to(one.path(second))
    assert read(first).num_steps == 4


@pytest.mark.parametrize("cut", [2, 10, 40])
def test_a_step_that_one_journal_holds_cut_short_is_the_same_step_in_all(tmp_path, cut):
    first, second = tmp_path / "a", tmp_path / "b"
    one = journal(first, 2)
    one.add_folder(second)
    # Killed while it wrote to the first file.
    write_to(one.path(first), cut=cut)
    for _ in range(2):
        assert read(second).num_steps == read(first).num_steps == 3
    one.path(first).unlink()
    assert read(second).num_steps == 3


def private_step(folder):
    plan = PrivacyPlan(num_train=10, expected_batch_size=5, num_steps=4, noise_multiplier=1.0, delta=1e-3)
    steps, model = journal(folder), nn.Linear(3, 1)
    data = TensorDataset(torch.randn(10, 3))
    return steps, PrivateStep(
        model, lambda batch: model(batch[0]).sum(), data, plan=plan, record=RunRecord(journal=steps)
    )


def take(private):
    for batch in private.batches():
        private.accumulate(batch)
    private.release()


def test_a_release_is_in_the_journal(tmp_path):
    _, private = private_step(tmp_path)
    for _ in range(2):
        take(private)
    assert read(tmp_path).runs == private.record.ledger.runs == ((1.0, 0.5, 2),)


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
    assert private.record.ledger.num_steps == 1
    assert all(torch.equal(p.grad, old) for p, old in zip(private.parameters.values(), before, strict=True))
    with pytest.raises(DataError, match="cannot be written"):
        steps.add_folder(tmp_path / "other", private.record.ledger)
    assert not (tmp_path / "other").exists()
    path.unlink(missing_ok=True)
    path.touch()
    with pytest.raises(DataError, match="cannot be written"):
        Journal("run").add_folder(path / "below a file", private.record.ledger)


def test_two_processes_do_not_record_the_same_run(tmp_path):
    first = journal(tmp_path, 2)
    second = journal(tmp_path)
    second.record(**STEP)
    with pytest.raises(DataError, match="changed by another process"):
        first.record(**STEP)
    second.record(**STEP)
    assert read(tmp_path).num_steps == 4


EDITS = {
    "noise multiplier": lambda lines: [lines[0], lines[1].replace(b"1.5", b"9.5"), *lines[2:]],
    "noise multiplier of the last step": lambda lines: [*lines[:-1], lines[-1].replace(b"1.5", b"9.5")],
    "sample rate": lambda lines: [lines[0], lines[1].replace(b"0.25", b"0.01"), *lines[2:]],
    "name": lambda lines: [lines[0], lines[1].replace(b'"step": "', b'"step": "0'), *lines[2:]],
    "nonce": lambda lines: [lines[0], lines[1].replace(b'"nonce": "', b'"nonce": "0'), *lines[2:]],
    "one step before": lambda lines: [lines[0], lines[1].replace(b'"after": ["', b'"after": ["0'), *lines[2:]],
    "the same step twice": lambda lines: [lines[0], lines[0], *lines[2:]],
    "a line less": lambda lines: [lines[0], *lines[2:]],
    "all but the last": lambda lines: lines[-1:],
    "two lines less and one that cannot be read": lambda lines: [lines[0], b"?", *lines[3:]],
}


@pytest.mark.parametrize("name", EDITS)
def test_a_journal_that_was_edited_is_refused(tmp_path, name):
    edit(journal(tmp_path, 5).path(tmp_path), name)
    with pytest.raises(DataError, match="is not as it was written"):
        read(tmp_path)


def edit(path, name):
    lines = [line for line in path.read_bytes().splitlines() if b"folder" not in line]
    edited = EDITS[name](lines)
    assert edited != lines
    path.write_bytes(b"\n".join([*edited, b""]))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_one_of_several_files_is_refused(tmp_path, name):
    first = journal(tmp_path / "a", 5)
    first.add_folder(tmp_path / "b")
    edit(first.path(tmp_path / "b"), name)
    with pytest.raises(DataError, match=r"b/privacy_journal_run\.jsonl is not as it was written"):
        read(tmp_path / "a")


def test_a_step_of_one_of_two_branches_is_missed(tmp_path):
    """Two processes went on from one step. The numbers fit without it, since the other branch makes up for it."""
    path = journal(tmp_path, 1).path(tmp_path)
    (first,), _ = read_journal(path, "run")
    one, other = (Step(**STEP, number=2, after=(first,), nonce=nonce) for nonce in "ab")
    last = Step(**STEP, number=3, after=(other.name("run"),), nonce="c")
    start = path.read_bytes()
    lines = [json.dumps({"step": step.name("run"), **asdict(step)}).encode() + b"\n" for step in (one, other, last)]
    path.write_bytes(start + b"".join(lines))
    assert read(tmp_path).num_steps == 4
    path.write_bytes(start + lines[0] + lines[2])
    with pytest.raises(DataError, match=f"1 steps are missing that others come after: {other.name('run')}"):
        read(tmp_path)


def test_a_run_does_not_take_the_steps_of_another(tmp_path):
    other = Journal("other")
    other.add_folder(tmp_path)
    other.record(**STEP)
    other.path(tmp_path).rename(tmp_path / "privacy_journal_run.jsonl")
    with pytest.raises(DataError, match="was edited"):
        read(tmp_path)


def test_the_heads_stand_for_all_steps(tmp_path):
    first, second = journal(tmp_path / "a", 3), tmp_path / "b"
    earlier = first.heads
    first.add_folder(second)
    first.record(noise_multiplier=2.0, sample_rate=0.5)
    write_to(first.path(tmp_path / "a"), nonce="a")
    write_to(first.path(second), nonce="b")
    again = journal(second)
    assert len(again.heads) == 2  # two processes went on from the same step
    again.record(**STEP)
    (head,) = again.heads
    steps, _ = read_journal(again.path(tmp_path / "a"), "run")
    assert heads_of(steps) == (head,)
    assert spent_in(up_to([head], steps)) == {(1.5, 0.25): 6, (2.0, 0.5): 1}
    assert spent_in(up_to(earlier, steps)) == {(1.5, 0.25): 3}
