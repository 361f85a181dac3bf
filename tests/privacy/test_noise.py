"""The noise of the mechanism: its distribution, its independence, its generator."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.privacy import ClipPlan, GaussianNoise, PoissonSampler, PrivateStep
from dp_lightning.privacy.sampling import sampling_key

SIZE = 20_000


def looks_normal(values, standard_deviation):
    """Kolmogorov-Smirnov at level 1e-6 and chi-square of the variance at 1e-6: whether the values fit N(0, sd^2)."""
    values = np.asarray(values, dtype=np.float64).ravel() / standard_deviation
    same_shape = stats.kstest(values, "norm").pvalue > 1e-6
    chi = stats.chi2(values.size)
    total = float((values**2).sum())
    return bool(same_shape and chi.ppf(5e-7) < total < chi.ppf(1 - 5e-7))


class Flat(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


def private_step(clip_plan, *, noise_multiplier=1.5, expected_batch_size=50, size=SIZE, slope=0.0, **kwargs):
    """Every example has the same gradient, ``slope`` in each entry."""
    module, data = Flat(size), TensorDataset(torch.ones(1000, 1))
    plan = plan_of(1000, expected_batch_size=expected_batch_size, noise_multiplier=noise_multiplier, delta=1e-5)

    def loss(batch):
        return slope * F.linear(batch[0], module.weight[:, None]).sum()

    return PrivateStep(module, loss, data, plan=plan, clip_plan=clip_plan, **kwargs)


@pytest.mark.parametrize(
    "clip_plan",
    [ClipPlan.flat(max_grad_norm=0.2), ClipPlan.per_layer(max_grad_norm=3.0)],
)
def test_noise_is_normal_with_sigma_times_sensitivity_over_b(clip_plan):
    found = released(private_step(clip_plan))
    expected = 1.5 * clip_plan.sensitivity / 50
    assert found.dtype == torch.float32
    assert looks_normal(found, expected)
    assert not looks_normal(found, expected * 2 / 3)
    assert not looks_normal(found, expected * 3 / 2)


@pytest.mark.parametrize("seed", [None, 3])
def test_successive_and_separate_noise_is_uncorrelated(seed):
    first = private_step(ClipPlan.flat(), seed=seed)
    second = private_step(ClipPlan.flat())
    draws = [released(first), released(first), released(second)]
    correlation = np.corrcoef(torch.stack(draws).numpy()) - np.eye(3)
    # Five standard errors of a correlation of independent values.
    assert np.abs(correlation).max() < 5 / math.sqrt(SIZE)


def test_every_number_of_every_parameter_has_noise_of_its_own():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    private = PrivateStep(
        module,
        lambda batch: 0 * module(batch[0]).sum(),
        TensorDataset(torch.ones(1000, 3)),
        plan=plan_of(1000, expected_batch_size=10, num_steps=100, delta=1e-5, noise_multiplier=1.5),
        clip_plan=ClipPlan.per_layer(max_grad_norm=2.0),
    )
    values = torch.stack([released(private) for _ in range(100)]).numpy() / (1.5 * 2.0 / 10)
    # Six standard errors, of a standard deviation and of a correlation of 100 independent values.
    assert np.abs(values.std(0) - 1).max() < 6 / math.sqrt(200)
    assert np.abs(np.corrcoef(values.T) - np.eye(21)).max() < 6 / math.sqrt(100)


def test_seed_everything_does_not_reach_the_noise():
    torch.manual_seed(0)
    first = GaussianNoise().add_to(torch.zeros(100), 1.0, step=0)
    torch.manual_seed(0)
    second = GaussianNoise().add_to(torch.zeros(100), 1.0, step=0)
    assert not torch.equal(first, second)
    before = torch.random.get_rng_state()
    GaussianNoise().add_to(torch.zeros(100), 1.0, step=0)
    GaussianNoise(seed=1).add_to(torch.zeros(100), 1.0, step=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_with_a_seed_the_noise_is_a_function_of_seed_and_step():
    def drawn(seed, step):
        return GaussianNoise(seed=seed).add_to(torch.zeros(SIZE), 1.0, step=step)

    assert torch.equal(drawn(3, 5), drawn(3, 5))
    draws = [drawn(seed, step) for seed in (0, 3) for step in (0, 1, 5)]
    correlation = np.corrcoef(torch.stack(draws).numpy()) - np.eye(6)
    assert np.abs(correlation).max() < 5 / math.sqrt(SIZE)
    assert all(looks_normal(values, 1.0) for values in draws)
    # Without one, the same step of another run has other noise.
    assert not torch.equal(drawn(None, 5), drawn(None, 5))


@pytest.mark.parametrize("b", [1, 7, 50])
def test_the_sum_is_divided_by_the_expected_batch_size(b):
    private = private_step(ClipPlan.flat(), noise_multiplier=0.0, expected_batch_size=b, size=1, slope=0.5, seed=0)
    sampler = PoissonSampler(num_train=1000, sample_rate=b / 1000, key=sampling_key(0))
    drawn = [len(sampler.draw(step)) for step in range(4)]
    assert len(set(drawn)) > 1
    # Each step starts from zero.
    assert [float(released(private)) for _ in range(4)] == pytest.approx([0.5 * count / b for count in drawn])
