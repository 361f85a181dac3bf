"""Poisson sampling: independent inclusions, numbered draws, empty draws, physical batches."""

import math

import numpy as np
import pytest

from dp_lightning.privacy import PoissonSampler
from dp_lightning.privacy.sampling import cut, sampling_key


def inclusions(draws=2000, num_train=200, q=0.1, **kwargs):
    sampler = PoissonSampler(num_train=num_train, sample_rate=q, **kwargs)
    table = np.zeros((draws, num_train))
    for step in range(draws):
        table[step, sampler.draw(step)] = 1
    return table


def test_batch_sizes_have_the_poisson_mean_and_variance():
    sizes = inclusions().sum(1)
    mean, variance = 20.0, 200 * 0.1 * 0.9
    # Five standard errors of a mean and of a variance.
    assert abs(sizes.mean() - mean) < 5 * math.sqrt(variance / 2000)
    assert abs(sizes.var() / variance - 1) < 5 * math.sqrt(2 / 2000)


def test_inclusions_are_independent_across_examples_and_steps():
    table = inclusions()
    counts = table.sum(0)
    assert np.abs(counts - 200).max() < 5.5 * math.sqrt(2000 * 0.09)
    across = np.corrcoef(table.T) - np.eye(200)
    assert np.abs(across).max() < 6 / math.sqrt(2000)
    after = np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]
    assert abs(after) < 5 / math.sqrt(table.size)


def test_two_runs_draw_differently_and_a_seed_repeats():
    def draws(key=None):
        sampler = PoissonSampler(num_train=1000, sample_rate=0.5, key=key)
        return np.concatenate([sampler.draw(step) for step in range(3)]).tolist()

    assert draws() != draws()
    assert draws(sampling_key()) != draws(sampling_key())
    assert draws(sampling_key(1)) == draws(sampling_key(1))
    assert draws(sampling_key(1)) != draws(sampling_key(2))


def test_draws_are_numbered():
    sampler = PoissonSampler(num_train=1000, sample_rate=0.5)
    first = sampler.draw(7).tolist()
    sampler.draw(8)
    assert sampler.draw(7).tolist() == first
    assert sampler.draw(8).tolist() != first


@pytest.mark.parametrize("size", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("count", [1, 5, 6, 11])
def test_physical_batches_hold_each_example_once_and_end_once(count, size):
    batches = list(cut(np.arange(count) * 3, size))
    assert [i for batch in batches for i in batch.indices] == [3 * i for i in range(count)]
    assert all(1 <= len(batch.indices) <= size for batch in batches)
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert [batch.piece for batch in batches] == list(range(len(batches)))


def test_an_empty_draw_is_one_batch_without_examples():
    (batch,) = cut(np.array([], dtype=np.int64), 4, step=7)
    assert (batch.step, batch.piece, batch.indices, batch.last) == (7, 0, (), True)
