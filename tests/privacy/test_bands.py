"""Noise that is correlated over steps: its coefficients, its covariance, its groups, and what it costs."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.bands import coefficients, deviations, error
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import RunShape, best_bands
from dp_lightning.privacy.record import RunRecord
from dp_lightning.privacy.sampling import PoissonSampler
from dp_lightning.privacy.step import PrivateStep

MOMENTUM = tuple(0.5**step for step in range(8))


def matrix(series: tuple[float, ...], size: int) -> Tensor:
    """The lower triangular Toeplitz matrix of a power series."""
    rows = [torch.diag(torch.full((size - k,), c, dtype=torch.float64), -k) for k, c in enumerate(series[:size])]
    return torch.stack(rows).sum(0)


@pytest.mark.parametrize(("bands", "num_steps"), [(1, 6), (2, 7), (3, 6), (6, 6), (8, 5)])
@pytest.mark.parametrize("response", [(1.0,), MOMENTUM])
def test_the_error_is_that_of_matrices_and_the_coefficients_have_the_smallest(
    bands: int, num_steps: int, response: tuple[float, ...]
) -> None:
    def in_weights(chosen: tuple[float, ...]) -> float:
        weights = matrix((1.0,) * num_steps, num_steps) @ matrix(response, num_steps)
        left = weights @ torch.linalg.inv(matrix(chosen, num_steps)) * np.linalg.norm(chosen)
        return (left.square().sum() / num_steps).sqrt().item()

    chosen = coefficients(bands, num_steps, response)
    assert len(chosen) == bands
    assert np.linalg.norm(chosen) == pytest.approx(1, abs=1e-12)
    assert error(chosen, num_steps, response) == pytest.approx(in_weights(chosen), rel=1e-9)
    for place in range(min(bands, num_steps)):
        for change in (0.01, -0.01):
            other = tuple(c + change * (k == place) for k, c in enumerate(chosen))
            assert in_weights(other) >= in_weights(chosen) * (1 - 1e-9)


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_no_participation_pattern_exceeds_the_stated_sensitivity(bands: int) -> None:
    steps = 6
    encoder = matrix(coefficients(bands, steps), steps)
    for count in range(steps + 1):
        for pattern in combinations(range(steps), count):
            if any(after - before < bands for before, after in pairwise(pattern)):
                continue
            assert count <= -(-steps // bands)
            for signs in product((1.0, -1.0), repeat=count):  # contributions of norm one, in one dimension
                given = torch.zeros(steps, dtype=torch.float64)
                given[list(pattern)] = torch.tensor(signs, dtype=torch.float64)
                changed = encoder @ given
                assert changed.norm() <= count**0.5 + 1e-12
                for step in pattern:  # each round changes rows of its own, by at most one
                    assert changed[step : step + bands].norm() <= 1 + 1e-12
                    changed[step : step + bands] = 0
                assert not changed.any()


@pytest.mark.parametrize(("bands", "first", "left_out"), [(1, 0, ()), (3, 0, ()), (3, 5, ()), (4, 2, (5,))])
def test_the_noise_has_the_covariance_of_its_coefficients(bands: int, first: int, left_out: tuple[int, ...]) -> None:
    steps, draws, chosen = 9, 100_000, coefficients(bands, 9, MOMENTUM)
    noise, kept = GaussianNoise(coefficients=chosen), [k for k in range(steps) if k not in left_out]
    drawn = torch.stack([noise.add_to(torch.zeros(draws), 2.0, step=first + k) for k in kept]).double()
    encoder = matrix(chosen, steps)
    expected = torch.linalg.inv(encoder.T @ encoder)[kept][:, kept] * 4
    spread = (torch.outer(expected.diagonal(), expected.diagonal()) + expected.square()).sqrt() / draws**0.5
    assert ((drawn @ drawn.T / draws - expected).abs() < 5 * spread).all()
    scale = torch.tensor([deviations(chosen, steps)[k] for k in kept], dtype=torch.float64)
    torch.testing.assert_close(2 * scale, expected.diagonal().sqrt(), rtol=1e-9, atol=0.0)


def test_each_example_is_in_one_group_whatever_the_others_are() -> None:
    bands, size, key = 4, 4000, (1, 2)
    sampler = PoissonSampler(num_train=size, sample_rate=0.5, bands=bands, key=key)
    draws = [set(sampler.draw(step).tolist()) for step in range(40)]
    groups = [set().union(*draws[group::bands]) for group in range(bands)]
    assert sum(map(len, groups)) == len(set().union(*groups)) == pytest.approx(size, abs=20)
    for group in groups:
        assert len(group) == pytest.approx(size / bands, abs=5 * (size * 3 / 16) ** 0.5)
    assert len(draws[5]) == pytest.approx(size * 0.5 / bands, abs=5 * (size / 8) ** 0.5)
    fewer = PoissonSampler(num_train=size - 1, sample_rate=0.5, bands=bands, key=key)
    assert all(set(fewer.draw(step).tolist()) == draws[step] - {size - 1} for step in range(8))
    assert draws[0] != set(PoissonSampler(num_train=size, sample_rate=0.5, bands=bands).draw(0).tolist())


# Epsilon at delta 1e-5 by jax_privacy 2.0.0, experimental.accounting.amplified_bandmf_event with dp-accounting 0.6.0.
@pytest.mark.parametrize(
    ("num_train", "batch_size", "bands", "num_steps", "noise_multiplier", "expected"),
    [
        (45_000, 512, 8, 264, 1.0, 3.978265),
        (45_000, 512, 16, 264, 1.2, 4.137759),
        (50_000, 1024, 4, 490, 1.5, 3.156871),
        (50_000, 1024, 8, 490, 2.0, 3.137372),
        (50_000, 4096, 4, 610, 4.0, 4.619040),
        (60_000, 256, 32, 703, 0.8, 7.535943),
        (10_000, 100, 10, 1001, 1.0, 7.080176),
        (1000, 50, 3, 100, 2.0, 2.115069),
        (50_000, 500, 2, 5000, 0.7, 14.53277),
        (20_000, 400, 50, 400, 3.0, 4.089234),
    ],
)
def test_epsilon_is_that_of_another_library(
    num_train: int, batch_size: int, bands: int, num_steps: int, noise_multiplier: float, expected: float
) -> None:
    shape = RunShape(num_train=num_train, expected_batch_size=batch_size, num_steps=num_steps, delta=1e-5, bands=bands)
    assert shape.with_noise(noise_multiplier).epsilon() == pytest.approx(expected, rel=0.01)


def test_more_bands_than_groups_of_a_batch_are_refused_and_auto_takes_those_with_the_smallest_error() -> None:
    numbers = {"num_train": 45_000, "expected_batch_size": 512, "delta": 1e-5}
    with pytest.raises(ConfigurationError, match="bands must be at most N/B = 87"):
        RunShape(**numbers, num_steps=264, bands=88)
    assert best_bands(RunShape(**numbers, num_steps=264), 4.0) == 16
    assert best_bands(RunShape(**numbers | {"expected_batch_size": 15_000}, num_steps=264), 4.0) <= 3
    assert best_bands(RunShape(**numbers | {"expected_batch_size": 4096}, num_steps=3000), 1.0) == 1


@pytest.mark.parametrize("bands", [1, 4])
def test_a_round_counts_with_its_first_step_and_a_step_of_another_process_begins_a_round(bands: int) -> None:
    size, steps = 64, 10
    data = TensorDataset(torch.randn(size, 3), torch.randint(2, (size,)))
    plan = RunShape(num_train=size, expected_batch_size=8, num_steps=steps, delta=1e-4, bands=bands).with_noise(2.0)
    model, record, counts = nn.Linear(3, 2), RunRecord(), []
    for block in (range(6), range(6, steps)):
        private = PrivateStep(
            model, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), data, plan=plan, record=record
        )
        for _ in block:
            for batch in private.batches():
                private.accumulate(batch)
            private.release()
            counts.append(record.ledger.totals.total())
    assert counts == (list(range(1, 11)) if bands == 1 else [1, 1, 1, 1, 2, 2, 3, 3, 3, 3])
    assert record.ledger.num_steps == steps
    assert record.ledger.runs == ((2.0, plan.sample_rate, counts[-1]),)
    assert plan.sample_rate == bands * 8 / size
