"""Signal, noise and the number of directions of a matrix, against closed forms and simulated noise."""

import math

import pytest
import torch

from dp_lightning.analysis import bulk_density, bulk_edges, participation_ratio, signal_to_noise
from dp_lightning.experiments.results import published
from dp_lightning.privacy.plan import PrivacyPlan


def test_the_effective_rank_of_a_spectrum():
    values = torch.tensor([[3.0, 1.0, 0.0], [0.7, 0.7, 0.7], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(participation_ratio(values), torch.tensor([1.6, 3.0, 0.0]))


@pytest.mark.parametrize("shape", [(64, 576), (300, 300), (400, 100)])
def test_the_bulk_is_where_the_values_of_noise_are(shape):
    values = torch.linalg.svdvals(0.3 * torch.randn(shape))
    low, high = bulk_edges(*shape, noise_level=0.3)
    # The largest value fluctuates by its scale over the 2/3 power of the size, 2 to 3 % here.
    assert low * 0.95 - 0.3 < values.min() <= values.max() < high * 1.03
    grid = torch.linspace(low, high, 20_001)
    density = bulk_density(grid, *shape, noise_level=0.3)
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-3)
    below_median = grid <= values.median()
    assert float(torch.trapezoid(density[below_median], grid[below_median])) == pytest.approx(0.5, abs=0.03)
    outside = torch.tensor([0.9 * low, 1.1 * high])
    assert not bulk_density(outside, *shape, noise_level=0.3).any()


@pytest.mark.parametrize("snr", [0.0, 0.06, 1.75])
def test_the_ratio_follows_from_noised_gradients_alone(snr):
    d, level = 100_000, 0.01
    signal = torch.full((d,), snr * level)
    squares = sum(float((signal + level * torch.randn(d)).square().sum()) / level**2 for _ in range(200))
    # The standard deviation of the averaged square is sqrt(2/d/200) = 3e-4, so noise alone reads at most 0.03.
    assert signal_to_noise(squares, 200 * d) == pytest.approx(snr, abs=0.035 if snr == 0 else 0.01)


def test_the_average_is_cut_off_and_not_its_terms():
    assert signal_to_noise(50.0 + 150.0, 200) == 0.0
    assert signal_to_noise(50.0 + 150.0 + 400.0, 300) == pytest.approx(1.0)


def test_the_papers_noise_norms_and_ratios():
    table = published()["snr"]
    columns = ("batch_sizes", "noise_multipliers", "noise", "signal", "cifar10")
    for batch_size, sigma, noise, signal, snr in zip(*(table[name] for name in columns), strict=True):
        plan = PrivacyPlan(
            num_train=50_000, expected_batch_size=batch_size, num_steps=1, noise_multiplier=sigma, delta=1e-5
        )
        found = plan.noise_level(1.0) * math.sqrt(2_748_890)
        assert found == pytest.approx(noise, abs=0.011)
        assert signal / found == pytest.approx(snr, abs=0.015)
