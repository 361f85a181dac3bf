"""The statistics of an audit: bounds of epsilon from scores, and tests of noise."""

import math

import numpy as np
import pytest
import torch

from dp_lightning.analysis.auditing import NoiseTests, gaussian_delta, gaussian_epsilon, mu_lower_bound
from dp_lightning.privacy.accounting import compose

TENSORS = {"weight": (30, 20), "bias": (10,), "head": (10, 30)}


@pytest.mark.parametrize(("sigma", "steps"), [(0.8, 1), (1.0, 4), (5.0, 16)])
def test_epsilon_of_mu_is_that_of_gaussian_steps_which_everybody_takes_part_in(sigma, steps):
    found = gaussian_epsilon(math.sqrt(steps) / sigma, 1e-5)
    claimed = compose([(sigma, 1.0, steps)], delta=1e-5)
    assert found <= claimed <= found + 0.02  # the accountant's discretisation
    assert gaussian_delta(found, math.sqrt(steps) / sigma) == pytest.approx(1e-5, rel=1e-6)


def test_no_separation_shows_no_epsilon():
    assert gaussian_epsilon(-1.0, 1e-5) == gaussian_epsilon(0.0, 1e-5) == gaussian_epsilon(1e-6, 1e-5) == 0.0


def test_the_bound_is_below_mu_and_comes_close_with_many_canaries():
    noise, mu = np.random.default_rng(0), 1.5
    bounds = [
        mu_lower_bound(noise.normal(mu, size=500), noise.normal(size=2000), (mu / 2, mu), alpha=0.05)
        for _ in range(100)
    ]
    # Clopper and Pearson's bounds, and the union over rates and thresholds, leave room below 5 %.
    assert np.mean(np.array(bounds) > mu) <= 0.05
    assert np.median(bounds) > 1.2
    none = mu_lower_bound(np.zeros(5), np.zeros(5), (0.5,), alpha=0.05)
    assert none == -math.inf


def of(*steps):
    tests = NoiseTests()
    for step in steps:
        tests.add(step)
    return tests


def honest(count=8, generator=None):
    return [{name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()} for _ in range(count)]


def failed(tests):
    results = list(tests.results())
    assert len(results) == len(tests)
    return {(test.kind, test.subject) for test in results if test.p_value < 1e-4 / len(tests)}


def test_honest_noise_passes_and_its_p_values_are_uniform():
    generator = torch.Generator().manual_seed(3)
    found = [of(*honest(generator=generator)) for _ in range(20)]
    assert not set().union(*map(failed, found))
    values = np.array([test.p_value for tests in found for test in tests.results()])
    for level in (0.01, 0.1, 0.5):
        # About 800 tests, some of them of the same numbers.
        assert np.mean(values < level) == pytest.approx(level, abs=6 * math.sqrt(level / len(values)))


def test_each_fault_is_found_where_it_is():
    steps = honest()
    assert ("size", "all tensors") in failed(of(*({n: t * 0.9 for n, t in s.items()} for s in steps)))
    assert ("size", "bias") in failed(of(*({**s, "bias": torch.zeros(10)} for s in steps)))
    assert {("steps", "bias"), ("steps", "weight")} <= failed(of(*[steps[0]] * 8))
    assert ("steps", "bias") in failed(of(*({**s, "bias": steps[0]["bias"]} for s in steps)))
    assert ("steps", "steps 1 and 4") in failed(of(*(steps[number % 3] for number in range(8))))
    same = ({**s, "head": s["weight"].flatten()[:300].view(10, 30)} for s in steps)
    assert failed(of(*same)) == {("tensors", "weight and head")}
    uniform = ({n: (torch.rand_like(t) - 0.5) * math.sqrt(12) for n, t in s.items()} for s in steps)
    assert failed(of(*uniform)) == {("shape", "all tensors")}
    assert ("size", "head") in failed(of(*({**s, "head": s["head"] * math.nan} for s in steps)))
