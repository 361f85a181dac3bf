"""The price of a choice among runs: against exact distributions of small mechanisms, and closed forms."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy import accounting, choice
from dp_lightning.privacy.accounting import ORDERS, compose, delta_of, divergences_of, epsilon_of
from dp_lightning.privacy.choice import draw_number, epsilon_of_choice, logarithmic_parameter

RUN = [(1.0, 0.02, 200)]


def distribution_of(expected, kind):
    """P[K = k] for k = 0, 1, ..."""
    counts = np.arange(4000)
    if kind == "poisson":
        return stats.poisson.pmf(counts, expected)
    return stats.logser.pmf(counts, 1 - logarithmic_parameter(expected))


@pytest.mark.parametrize("kind", ["logarithmic", "poisson"])
@pytest.mark.parametrize("expected", [2.0, 10.0, 40.0])
@pytest.mark.parametrize("leak", [0.05, 0.3])
def test_the_bound_holds_for_the_exact_release_of_a_small_mechanism(monkeypatch, kind, expected, leak):
    """A run answers with one of three scores; the exact Renyi divergence of the best of K is at most the bound."""
    p = np.array([0.2, 0.5, 0.3])
    q = np.array([0.2 * math.exp(leak), 0.5, 0.0])
    q[2] = 1 - q.sum()

    def divergence(one, other, order):
        inside = one > 0
        return logsumexp(order * np.log(one[inside]) + (1 - order) * np.log(other[inside])) / (order - 1)

    def of_best(single):
        chances, below = distribution_of(expected, kind), np.concatenate([[0.0], single.cumsum()])
        best = (chances[:, None] * np.diff(below[None] ** np.arange(len(chances))[:, None], axis=1)).sum(0)
        return np.concatenate([best, [chances[0]]])

    single = [max(divergence(p, q, order), divergence(q, p, order)) for order in ORDERS]
    monkeypatch.setattr(choice, "divergences_of", lambda runs: single)
    seen = []
    monkeypatch.setattr(choice, "epsilon_of", lambda bound, delta: seen.append(bound) or 0.0)
    epsilon_of_choice([RUN], expected_runs=expected, delta=1e-5, distribution=kind)
    best = of_best(p), of_best(q)
    for order, bound in zip(ORDERS, seen[0], strict=True):
        if order <= 64:
            assert max(divergence(*best, order), divergence(*best[::-1], order)) <= bound + 1e-9


def test_the_price_is_that_of_the_formulas_and_the_worst_setting_counts():
    runs = [RUN, [(0.9, 0.02, 200)], [(2.0, 0.02, 400)]]
    one = np.max([divergences_of(each) for each in runs], axis=0)
    g, m, a = logarithmic_parameter(10.0), 10.0, np.array(ORDERS)
    by_hand = min(
        epsilon_of(one + (1 - 1 / b) * r + math.log(1 / g) / b + math.log(m) / (a - 1), 1e-5)
        for b, r in zip(ORDERS, one, strict=True)
    )
    found = epsilon_of_choice(runs, expected_runs=10.0, delta=1e-5)
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert found == epsilon_of_choice(runs[::-1], expected_runs=10.0, delta=1e-5)
    alone = compose(runs[1], delta=1e-5, accountant="rdp")
    assert alone < found < 3 * alone
    assert alone < epsilon_of_choice(runs, expected_runs=10.0, delta=1e-5, distribution="poisson") < 3 * alone


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 10.0])
def test_delta_and_epsilon_are_of_one_bound(epsilon):
    divergences = divergences_of(RUN)
    delta = delta_of(divergences, epsilon)
    assert epsilon_of(divergences, delta) == pytest.approx(epsilon, rel=1e-6) or delta == 1
    assert accounting.compose(RUN, delta=1e-5, accountant="rdp") == epsilon_of(divergences, 1e-5)


@pytest.mark.parametrize("kind", ["logarithmic", "poisson"])
def test_the_number_of_runs_has_its_distribution(kind):
    generator = np.random.default_rng()
    drawn = np.array([draw_number(10.0, kind, generator) for _ in range(4000)])
    chances = distribution_of(10.0, kind)
    for count in (1, 2, 3, 8, 12):
        assert (drawn == count).mean() == pytest.approx(chances[count], abs=5 * (chances[count] / 4000) ** 0.5)
    assert drawn.min() == 1 or kind == "poisson"


@pytest.mark.parametrize(
    ("expected", "kind"),
    [(1.0, "logarithmic"), (0.5, "logarithmic"), (0.9, "poisson"), (0.0, "poisson"), (2e6, "poisson")],
)
def test_an_impossible_mean_is_refused(expected, kind):
    with pytest.raises(ConfigurationError, match="expected number of runs must be"):
        epsilon_of_choice([RUN], expected_runs=expected, delta=1e-5, distribution=kind)
