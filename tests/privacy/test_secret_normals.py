"""Noise that is not secret: its distribution, and where its bits come from."""

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


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture(params=["CPU", "GPU"])
def draw(request, monkeypatch):
    """The noise as each kind of device draws it, on a CPU."""
    if request.param == "GPU":
        monkeypatch.setattr(
            module, "_random_words", lambda count, device: module._of_key(secrets.token_bytes(32), count, device)
        )
    return lambda shape: module.secret_normals(shape, CPU)


def test_values_are_independent_standard_normals(draw):
    values = draw((12 * module._PAIRS["cpu"],))
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


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2 * module._PAIRS["cpu"] + 1,)])
def test_any_shape_is_filled(draw, shape):
    values = draw(shape)
    assert values.shape == shape
    assert torch.isfinite(values).all()
    assert (values != 0).all()


def test_a_pair_is_box_and_mullers_of_128_bits_of_the_cryptographic_generator(monkeypatch):
    count = 2 * module._PAIRS["cpu"] + 6
    rng = np.random.default_rng(0)
    given = []

    def known(size):
        given.append(rng.integers(-(2**63), 2**63, size // 8, dtype=np.int64))
        return given[-1].tobytes()

    monkeypatch.setattr(ssl, "RAND_bytes", known)
    found = GaussianNoise().add_to(torch.zeros(count), 1.0, step=0).double().numpy()
    expected = []
    for bits in given:
        for_radius, for_angle = np.split((bits & (2**52 - 1)) / 2.0**52, 2)  # [0, 1)
        radius, angle = np.sqrt(-2 * np.log(1 - for_radius)), (2 * for_angle - 1) * np.pi
        expected += [*(radius * np.cos(angle)), *(radius * np.sin(angle))]
    assert sum(len(bits) for bits in given) == count
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "largest"), [(-1, math.sqrt(104 * math.log(2))), (0, 0.0)])
def test_the_smallest_and_the_largest_number_are_finite(monkeypatch, bits, largest):
    monkeypatch.setattr(ssl, "RAND_bytes", lambda size: np.full(size // 8, bits, np.int64).tobytes())
    values = module.secret_normals((2,), CPU)
    assert float(values.double().norm()) == pytest.approx(largest, abs=1e-6)


def test_on_a_gpu_each_block_has_a_fresh_key_of_256_bits(draw, monkeypatch):
    """A key is used once: whoever learns it, or draws again after an interruption, has nothing of another block."""
    keys = []

    def known(size):
        keys.append(bytes([len(keys)] * size))
        return keys[-1]

    monkeypatch.setattr(secrets, "token_bytes", known)
    monkeypatch.setattr(
        module, "_random_words", lambda count, device: module._of_key(secrets.token_bytes(32), count, device)
    )
    first = draw((2 * module._PAIRS["cpu"] + 2,))
    assert [len(key) for key in keys] == [32, 32]
    monkeypatch.setattr(secrets, "token_bytes", lambda size: keys[1])
    torch.testing.assert_close(draw((2,)), first[-2:], rtol=0, atol=0)
    assert not torch.equal(draw((2,)), first[:2])


def test_the_key_of_another_device_comes_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(secrets, "token_bytes", lambda size: asked.append(size) or bytes(size))
    words = module._random_words(9, torch.device("meta"))
    assert asked == [32]
    assert (words.shape, words.dtype, words.device.type) == ((9,), torch.int64, "meta")


@pytest.mark.gpu
def test_noise_on_a_gpu_is_normal_and_differs_each_time():
    first, second = (module.secret_normals((200_000,), torch.device("cuda")).cpu() for _ in range(2))
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 5 / math.sqrt(200_000)


def test_torchs_defaults_do_not_reach_the_noise(draw):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert draw((3,)).device.type == "cpu"
        assert draw((3,)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
