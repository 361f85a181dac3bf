"""A statement is true: epsilon is that of the steps taken, and what is not covered is named."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from dp_lightning.errors import DataError
from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.statement import ONE_PERSON, PrivacyStatement


def statement(
    *, steps: int = 3, noise_multiplier: float = 1.0, target: float | None = None, **facts: object
) -> PrivacyStatement:
    plan = PrivacyPlan(
        num_train=1000,
        expected_batch_size=10,
        num_steps=20,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        target_epsilon=target,
    )
    ledger = Ledger()
    for _ in range(steps):
        ledger.record(noise_multiplier=noise_multiplier, sample_rate=plan.sample_rate)
    given = {
        "clipping": {"kind": "flat", "max_grad_norm": 1.0},
        "sensitivity": 1.0,
        "sampler": "Poisson",
        "versions": {"torch": "2.14.1"},
        **facts,
    }
    return PrivacyStatement(plan=plan, ledger=ledger, **given)


def test_epsilon_is_that_of_the_steps_taken() -> None:
    facts = statement(steps=3).to_dict()
    expected = compose([(1.0, 0.01, 3)], delta=1e-5)
    assert facts["epsilon"]["prv"] == expected
    assert (facts["num_steps"], facts["num_steps_planned"]) == (3, 20)
    assert facts["release"] == "ok"
    assert statement(steps=0).to_dict()["epsilon"]["prv"] == 0


def test_a_run_without_noise_is_not_private() -> None:
    result = statement(noise_multiplier=0.0)
    facts = result.to_dict()
    assert facts["epsilon"] == {"prv": "inf", "rdp": "inf", "pld": "inf"}
    assert facts["private"] is False
    assert facts["release"].startswith("not for release: not private")
    assert result.short().startswith("NOT PRIVATE")
    assert "None. This run is not private" in result.to_markdown()
    assert "differentially private" not in result.to_markdown()


def test_a_statement_is_read_again_from_its_own_values() -> None:
    first = statement(unprotected=("a", "b"), target=3.0, run="r", journal_head="h")
    facts = json.loads(json.dumps(first.to_dict()))
    again = PrivacyStatement.from_dict(facts)
    assert again.to_dict() == first.to_dict()
    assert again.to_markdown() == first.to_markdown()
    assert PrivacyStatement.from_dict(first.saved()).to_dict() == first.to_dict()  # as a checkpoint has it
    for broken in ({}, {**facts, "ledger": "none"}, {**facts, "delta": 7}, {**facts, "num_train": None}):
        with pytest.raises(DataError, match="not a privacy statement"):
            PrivacyStatement.from_dict(broken)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"reproducible": True}, "knows its seed can subtract the noise"),
        ({"target": 1e-3}, "exceeds its target"),
        ({"noise_multiplier": 0.02}, "is above 20 and protects nobody"),
        ({"faults": ("weights are not finite", "the run ended")}, "weights are not finite; the run ended"),
    ],
)
def test_a_broken_condition_is_not_for_release(facts: dict, reason: str) -> None:
    result = statement(**facts)
    assert result.release.startswith("not for release: ")
    for text in (result.release, result.short(), result.to_markdown()):
        assert reason in text


def test_a_statement_does_not_change_with_later_steps() -> None:
    ledger = Ledger()
    ledger.record(noise_multiplier=1.0, sample_rate=0.01)
    frozen = PrivacyStatement(plan=statement().plan, ledger=ledger, clipping={}, sensitivity=1.0, sampler="Poisson")
    ledger.record(noise_multiplier=1.0, sample_rate=0.01)
    assert frozen.to_dict()["num_steps"] == 1


def test_it_says_first_how_often_a_guess_about_one_person_is_right() -> None:
    first = statement(noise_multiplier=0.5, steps=9).to_markdown().partition("## Guarantee")[0]
    spent = statement(noise_multiplier=0.5, steps=9).epsilon["prv"]
    share = float(re.search(r"at most ([\d.]+) % of cases", first)[1])
    assert 0 <= share - 100 * math.exp(spent) / (1 + math.exp(spent)) < 0.11
    assert "one image was among the training data" in first
    assert "a person's images were" in statement(unit_of_privacy=ONE_PERSON).to_markdown()
    assert "Nobody in the training data is protected" in statement(noise_multiplier=0.0).to_markdown()


def test_write_replaces_both_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "version_0"
    statement(steps=1).write(folder)
    as_json, as_markdown = statement(steps=2, clipping={"norms": (1.0, math.inf)}).write(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "privacy_statement.json",
        "privacy_statement.md",
    ]
    facts = json.loads(as_json.read_text())
    assert facts["num_steps"] == 2
    assert facts["clipping"] == {"norms": [1.0, "inf"]}
    assert as_markdown.read_text().startswith("# Privacy statement\n\nRelease: ok.")


def test_it_says_what_changed_during_the_run() -> None:
    plain = statement()
    assert "noise was changed" not in plain.to_markdown()
    ledger = Ledger()
    ledger.record(noise_multiplier=2.0, sample_rate=0.01)
    ledger.record(noise_multiplier=3.0, sample_rate=0.02)
    changed = dataclasses.replace(statement(target=4.0), ledger=ledger, lost_steps=3, num_ranks=8)
    assert changed.epsilon["prv"] == ledger.epsilon(delta=plain.plan.delta)
    facts, text = changed.to_dict(), changed.to_markdown()
    assert (facts["lost_steps"], facts["num_ranks"]) == (3, 8)
    assert facts["ledger"] == [[2.0, 0.01, 1], [3.0, 0.02, 1]]
    for phrase in (
        "| target epsilon | 4 |",
        "| lost steps | 3 |",
        "1 times noise multiplier 2, sample rate 0.01; 1 times noise multiplier 3",
        "the noise was changed after some steps",
    ):
        assert phrase in text
