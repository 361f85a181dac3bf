"""A known ``seed_everything`` does not tell whether an example was in; a small run of ``benchmarks/membership.py``."""

from pathlib import Path

import pytest
from scipy.stats import binom


@pytest.fixture
def membership(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import membership

    return membership


def test_the_seed_of_a_run_does_not_tell_who_was_in(membership):
    setting = membership.Setting(size=100, num_steps=4, noise_multiplier=8.0)
    runs = 20
    # Once in ten thousand times an attacker who has nothing but the releases is right more often.
    assert membership.right(runs, setting, public=False) <= binom.isf(1e-4, runs, setting.allowed)


def test_the_attack_succeeds_where_random_numbers_are_public(membership):
    setting = membership.Setting(size=100, num_steps=4, noise_multiplier=8.0)
    runs = 10
    # Right with a probability of 0.96; 6 and fewer come once in 2,000 times.
    assert membership.right(runs, setting, public=True) >= 7
