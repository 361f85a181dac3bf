"""What a module is tried on: other numbers of the same kind."""

import math

import pytest
import torch

from dp_lightning.callbacks.made_up import MadeUp


def made_up(examples, num_classes=0):
    return MadeUp(examples, num_classes, torch.Generator().manual_seed(0))


def test_labels_of_all_classes_are_drawn_and_equal_ones_stand_together():
    for kind in (int, torch.tensor):
        examples = [(torch.randn(2), kind(label)) for label in (3, 5, 4, 5) * 4]
        changed = made_up(examples, 10).with_other_integers()
        labels = [int(label) for _, label in changed]
        assert {type(label) for _, label in changed} == {type(examples[0][1])}
        assert len(set(labels[:4])) == 1
        assert set(labels) <= set(range(10))
        assert not set(labels) <= {3, 4, 5}
        assert labels[8:] == [3, 5, 4, 5] * 2
        assert all(new[0] is old[0] for new, old in zip(changed, examples, strict=True))


@pytest.mark.parametrize("num_classes", [0, 4, 10, 100])
def test_several_integers_stay_together(num_classes):
    examples = [{"x": torch.randn(2), "fine": 3 * k, "coarse": torch.tensor(k), "seen": True} for k in range(16)]
    changed = made_up(examples, num_classes).with_other_integers()
    fine = [example["fine"] for example in changed]
    assert fine == [3 * int(example["coarse"]) for example in changed]
    assert len(set(fine[:4])) == 1
    assert fine != [3 * k for k in range(16)]
    assert all(example["seen"] is True for example in changed)


@pytest.mark.parametrize("num_classes", [0, 4])
def test_unknown_classes_are_not_drawn(num_classes):
    examples = [(torch.randn(2), 17 * k) for k in range(16)]
    labels = [label for _, label in made_up(examples, num_classes).with_other_integers()]
    assert set(labels) <= {17 * k for k in range(16)}
    assert labels != [17 * k for k in range(16)]


def test_lengths_and_uneven_examples_stay():
    for examples in (
        [(torch.randn(k + 1), k + 1) for k in range(8)],
        [(torch.randn(2), [1] * (k + 1)) for k in range(8)],
        [(torch.randn(2),) for _ in range(8)],
    ):
        made = made_up(examples, 100)
        assert all(new is old for new, old in zip(made.with_other_integers(), examples, strict=True))
        assert made.like(examples[3])[0].shape == examples[3][0].shape


def test_values_that_stand_often_are_put_in_where_asked_for():
    generator = torch.Generator().manual_seed(1)

    def example(k):
        frames = torch.randn(6, 4, generator=generator)
        frames[3 + k % 3 :] = 0
        several = torch.rand(5, generator=generator)
        several[k % 5] = -1
        return frames, several, torch.tensor(math.nan if k % 3 else k / 7), torch.tensor(k % 2), torch.eye(4)[k % 4]

    examples = [example(k) for k in range(32)]
    made = made_up(examples)
    assert made.has_broken_marks

    def counts(marks):
        new = [made.like(example, marks=marks) for example in examples]
        assert all(int(row[3]) == k % 2 for k, row in enumerate(new))
        # Never all of a tensor, so that a mean over what is not missing exists.
        assert not any((row[0] == 0).all() or (row[1] == -1).all() for row in new)
        return [
            sum(bool((row[0] == 0).any(1).logical_and((row[0] == 0).all(1)).any()) for row in new),
            sum(bool((row[1] == -1).any()) for row in new),
            sum(bool(row[2].isnan()) for row in new),
            sum(bool(((row[4] == 0) | (row[4] == 1)).any()) for row in new),
        ]

    assert counts("none") == [0, 0, 0, 0]
    frames, several, broken, hot = counts("finite")
    assert broken == 0
    assert min(frames, several, hot) > 4
    frames, several, broken, hot = counts("all")
    assert min(frames, several, broken, hot) > 4


@pytest.mark.parametrize("looked_at", [2**20, 40])
def test_no_marks_are_found_where_all_values_differ(looked_at, monkeypatch):
    monkeypatch.setattr("dp_lightning.callbacks.made_up._LOOKED_AT", looked_at)
    examples = [(torch.randn(5), torch.randn(()), 3) for _ in range(16)]
    made = made_up(examples)
    assert not made.has_broken_marks
    seen = {value for values, *_ in examples for value in values.tolist()}
    assert not any(seen & set(made.like(example, marks="all")[0].tolist()) for example in examples)


def test_what_looks_like_a_label_stays_and_the_rest_is_made_up():
    generator = torch.Generator().manual_seed(1)

    def example(k):
        return {
            "image": torch.randn(1, 4, 4, generator=generator),
            "unit": torch.rand(1, 4, 4, generator=generator),
            "label": torch.tensor(float(k)),
            "hot": torch.eye(8)[k],
            "mask": torch.full((1, 4, 4), float(k % 3)),
            "bytes": torch.full((3, 4, 4), 10 + k, dtype=torch.uint8),
            "broken": torch.tensor([math.nan, math.inf]),
            "other": "text",
        }

    examples = [example(k) for k in range(8)]
    made = made_up(examples)
    for outlying in (False, True):
        new = made.like(examples[5], outlying=outlying)
        for kept in ("label", "other"):
            assert new[kept] is examples[5][kept]
        for name in ("unit", "mask", "hot"):
            assert float(new[name].min()) >= 0
            assert float(new[name].max()) <= 1
            assert not torch.equal(new[name], examples[5][name])
        for name in ("image", "broken"):
            assert (float(new[name].max()) > 10) == outlying
        assert new["bytes"].dtype == torch.uint8
        assert set(new["bytes"].unique().tolist()) <= set(range(10, 18))
        assert len(new["bytes"].unique()) > 1
