"""The noise of the mechanism: its distribution, its independence, its generator."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dp_lightning.errors import BudgetError, ConfigurationError
from dp_lightning.privacy import ClipPlan, GaussianNoise, Ledger, PrivacyPlan, PrivateMechanism

SIZE = 20_000


def looks_normal(values, standard_deviation):
    """Kolmogorov-Smirnov at level 1e-6 and chi-square of the variance at 1e-6: whether the values fit N(0, sd^2)."""
    values = np.asarray(values, dtype=np.float64).ravel() / standard_deviation
    same_shape = stats.kstest(values, "norm").pvalue > 1e-6
    chi = stats.chi2(values.size)
    total = float((values**2).sum())
    return bool(same_shape and chi.ppf(5e-7) < total < chi.ppf(1 - 5e-7))


def mechanism(clip_plan, *, noise_multiplier=1.5, expected_batch_size=50, num_steps=10, seed=None, size=SIZE):
    plan = PrivacyPlan(
        num_train=1000,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        delta=1e-5,
        noise_multiplier=noise_multiplier,
    )
    return PrivateMechanism(
        {"weight": torch.zeros(size)}, plan=plan, clip_plan=clip_plan, noise=GaussianNoise(seed=seed), ledger=Ledger()
    )


@pytest.mark.parametrize(
    "clip_plan",
    [
        ClipPlan.flat(max_grad_norm=0.2),
        ClipPlan.per_layer(max_grad_norm=3.0),
        ClipPlan.per_layer(max_grad_norm={"": 4.0}),
    ],
)
def test_noise_is_normal_with_sigma_times_sensitivity_over_b(clip_plan):
    released = mechanism(clip_plan).release().gradients["weight"]
    expected = 1.5 * clip_plan.sensitivity / 50
    assert released.dtype == torch.float32
    assert looks_normal(released, expected)
    assert not looks_normal(released, expected * 2 / 3)
    assert not looks_normal(released, expected * 3 / 2)


def test_the_check_of_the_distribution_can_fail():
    uniform = np.random.default_rng(0).uniform(-1, 1, SIZE) * math.sqrt(3)
    assert not looks_normal(uniform, 1.0)


def test_successive_and_separate_noise_is_uncorrelated():
    first = mechanism(ClipPlan.flat())
    second = mechanism(ClipPlan.flat())
    draws = [
        first.release().gradients["weight"],
        first.release().gradients["weight"],
        second.release().gradients["weight"],
    ]
    correlation = np.corrcoef(torch.stack(draws).numpy()) - np.eye(3)
    # Five standard errors of a correlation of independent values.
    assert np.abs(correlation).max() < 5 / math.sqrt(SIZE)


def test_seed_everything_does_not_reach_the_noise():
    torch.manual_seed(0)
    first = GaussianNoise().add_to(torch.zeros(100), 1.0)
    torch.manual_seed(0)
    second = GaussianNoise().add_to(torch.zeros(100), 1.0)
    assert not torch.equal(first, second)
    before = torch.random.get_rng_state()
    GaussianNoise().add_to(torch.zeros(100), 1.0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_fixed_seed_goes_on_after_a_checkpoint_and_a_secret_one_starts_anew():
    fixed = GaussianNoise(seed=3)
    fixed.add_to(torch.zeros(10), 1.0)
    state = fixed.state_dict()
    expected = fixed.add_to(torch.zeros(10), 1.0)
    resumed = GaussianNoise(seed=3)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.add_to(torch.zeros(10), 1.0), expected)
    with pytest.raises(ConfigurationError, match="noise_seed"):
        GaussianNoise(seed=4).load_state_dict(state)

    secret = GaussianNoise()
    state = secret.state_dict()
    assert state["generator"] is None
    after = secret.add_to(torch.zeros(10), 1.0)
    resumed = GaussianNoise()
    resumed.load_state_dict(state)
    assert not torch.equal(resumed.add_to(torch.zeros(10), 1.0), after)


@pytest.mark.parametrize("b", [1, 7, 50])
def test_the_sum_is_divided_by_the_expected_batch_size(b):
    private = mechanism(ClipPlan.flat(), noise_multiplier=0.0, expected_batch_size=b, size=4)
    private._sum.sums["weight"] += 3.0
    torch.testing.assert_close(private.release().gradients["weight"], torch.full((4,), 3.0 / b))
    # The next step starts from zero.
    torch.testing.assert_close(private.release().gradients["weight"], torch.zeros(4))


def test_every_release_is_in_the_ledger_and_none_follows_the_last():
    private = mechanism(ClipPlan.flat(), num_steps=3, size=4)
    for step in range(3):
        private.require_budget()
        private.release()
        assert private.ledger.num_steps == step + 1
    assert private.ledger.runs == ((1.5, 0.05, 3),)
    with pytest.raises(BudgetError, match="3 logical steps"):
        private.require_budget()
    with pytest.raises(BudgetError):
        private.release()
    assert private.ledger.num_steps == 3
