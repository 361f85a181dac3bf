"""Noise that is not secret: its distribution, and where its bits come from."""

import itertools
import math
import secrets
import ssl

import numpy as np
import pytest
import torch
from scipy import stats

from dp_lightning.privacy import GaussianNoise
from dp_lightning.privacy import secret_normals as module

CPU = torch.device("cpu")
WAYS = {"bytes": lambda shape: module.secret_normals(shape, CPU), "seeds": lambda shape: module._from_seeds(shape, CPU)}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_independent_standard_normals(way):
    values = WAYS[way]((12 * module._PAIRS,))
    assert values.dtype == torch.float32
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-6
    # The tails by themselves: how many of the values lie beyond 3.5 deviations on either side.
    for tail in (values > 3.5, values < -3.5):
        assert stats.binomtest(int(tail.sum()), len(values), stats.norm.sf(3.5)).pvalue > 1e-6
    blocks = values.view(12, -1).double().numpy()  # the two values of a pair lie at one place of two of them
    correlation = np.corrcoef(blocks) - np.eye(12)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(blocks.shape[1])
    squares = np.corrcoef(blocks**2) - np.eye(12)
    assert np.abs(squares).max() < 5.5 / math.sqrt(blocks.shape[1])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2 * module._PAIRS + 1,)])
@pytest.mark.parametrize("way", WAYS)
def test_any_shape_is_filled(way, shape):
    values = WAYS[way](shape)
    assert values.shape == shape
    assert torch.isfinite(values).all()
    assert (values != 0).all()


def test_a_pair_is_box_and_mullers_of_128_bits_of_the_cryptographic_generator(monkeypatch):
    count = 2 * module._PAIRS + 6
    rng = np.random.default_rng(0)
    given = []

    def known(size):
        given.append(rng.integers(-(2**63), 2**63, size // 8, dtype=np.int64))
        return given[-1].tobytes()

    monkeypatch.setattr(ssl, "RAND_bytes", known)
    found = GaussianNoise().add_to(torch.zeros(count), 1.0, step=0).double().numpy()
    expected = []
    for bits in given:
        radius_bits, angle_bits = np.split(bits, 2)
        u = ((radius_bits >> 11) + 2**52 + 1) / 2.0**53
        radius, angle = np.sqrt(-2 * np.log(u)), (angle_bits >> 11) / 2.0**52 * np.pi
        expected += [*(radius * np.cos(angle)), *(radius * np.sin(angle))]
    assert sum(len(bits) for bits in given) == count
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "largest"), [(-(2**63), math.sqrt(106 * math.log(2))), (2**63 - 1, 0.0)])
def test_the_smallest_and_the_largest_number_are_finite(monkeypatch, bits, largest):
    monkeypatch.setattr(ssl, "RAND_bytes", lambda size: np.full(size // 8, bits, np.int64).tobytes())
    values = module.secret_normals((2,), CPU)
    assert float(values.double().norm()) == pytest.approx(largest, abs=1e-6)


def test_each_draw_from_seeds_takes_four_fresh_ones_of_64_bits(monkeypatch):
    asked, numbers = [], itertools.count()

    def known(bits):
        asked.append(bits)
        return next(numbers)

    monkeypatch.setattr(secrets, "randbits", known)
    draws = [module._from_seeds((5,), CPU), module._from_seeds((5,), CPU)]
    assert asked == [64] * 8
    for first, draw in zip((0, 4), draws, strict=True):
        parts = [torch.randn(5, generator=torch.Generator().manual_seed(first + k)) for k in range(4)]
        torch.testing.assert_close(draw, torch.stack(parts).sum(0) / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_on_a_gpu_is_normal_and_differs_each_time():
    first, second = (module.secret_normals((200_000,), torch.device("cuda")).cpu() for _ in range(2))
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 5 / math.sqrt(200_000)


@pytest.mark.parametrize("way", WAYS)
def test_torchs_defaults_do_not_reach_the_noise(way):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert WAYS["bytes"]((3,)).device.type == "cpu"
        assert WAYS[way]((3,)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
