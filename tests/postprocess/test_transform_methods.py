"""Each method against an independent implementation of it."""

import pytest
import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    Chain,
    Kalman,
    LowPass,
    MagnitudeScale,
    Momentum,
    Orthogonalize,
    Scale,
    newton_schulz,
)


def gradients(steps: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, generator=generator) for _ in range(steps)]


def descend(optimizer_class: type, sequence: list[Tensor], transforms: list, **settings: object) -> list[Tensor]:
    """The iterates from zero of an optimizer that is fed a fixed sequence of gradients through a chain."""
    weight = torch.nn.Parameter(torch.zeros_like(sequence[0]))
    optimizer = optimizer_class([weight], **settings)
    chain = Chain(transforms)
    iterates = []
    for gradient in sequence:
        weight.grad = chain({"weight": gradient})["weight"].clone()
        optimizer.step()
        iterates.append(weight.detach().clone())
    return iterates


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (64, 144)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_dp_muon_with_sgd_is_torch_muon(shape, precision):
    sequence = gradients(5, *shape, dtype=torch.float32)
    transforms = [Momentum(0.95, kind="ema_nesterov"), Orthogonalize(precision=precision)]
    ours = descend(torch.optim.SGD, sequence, transforms, lr=0.02)
    theirs = descend(
        torch.optim.Muon,
        sequence,
        [],
        lr=0.02,
        weight_decay=0.0,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="original",
    )
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        # torch.optim.Muon iterates in bfloat16 (eps 0.0078) and adds in another order: 0.9 to 1.8 % seen.
        assert (a - b).norm() < 0.03 * a.norm(), step


def test_heavy_ball_is_the_momentum_of_sgd():
    sequence = gradients(20, 4, 5)
    ours = descend(torch.optim.SGD, sequence, [Momentum(0.9)], lr=0.3)
    theirs = descend(torch.optim.SGD, sequence, [], lr=0.3, momentum=0.9)
    # The same operations in float64.
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


def test_doppler_sgd_at_ten_times_the_rate_is_dp_sgd_with_momentum():
    sequence = gradients(50, 6, 7)
    doppler = descend(torch.optim.SGD, sequence, [LowPass()], lr=3.0)
    dp_sgd = descend(torch.optim.SGD, sequence, [], lr=0.3, momentum=0.9)
    # Equal in exact arithmetic; float64 rounding over 50 steps of size one is below 1e-13.
    torch.testing.assert_close(doppler, dp_sgd, atol=1e-12, rtol=0)


def test_magnitude_scale_restores_the_spectral_norm_of_the_input():
    (matrix,) = gradients(1, 12, 3)
    chain = Chain([MagnitudeScale(Orthogonalize())])
    sigma = torch.linalg.svdvals(matrix)[0]
    # sqrt(12 / 3) = 2 is the dimension scale; float64 rounding.
    expected = 2 * sigma * newton_schulz(matrix)
    torch.testing.assert_close(chain({"w": matrix})["w"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(chain({"w": 5 * matrix})["w"], 5 * expected, rtol=1e-12, atol=0)


def test_dp_muon_s_scales_by_the_momentum_and_not_by_the_gradient():
    first, second = gradients(2, 6, 8)
    chain = Chain([Momentum(0.9), MagnitudeScale(Orthogonalize())])
    chain({"w": first})
    momentum = 0.9 * first + second
    expected = torch.linalg.svdvals(momentum)[0] * newton_schulz(momentum)
    # float64 rounding.
    torch.testing.assert_close(chain({"w": second})["w"], expected, rtol=1e-12, atol=1e-12)


def test_matrices_of_one_shape_are_orthogonalized_on_their_own():
    a, b = gradients(2, 4, 18)
    kernel = b.reshape(4, 2, 3, 3)
    together = Chain([Orthogonalize()])({"a": a, "kernel": kernel})
    # float64 rounding.
    torch.testing.assert_close(together["a"], newton_schulz(a), rtol=0, atol=1e-13)
    torch.testing.assert_close(together["kernel"], newton_schulz(b).reshape(4, 2, 3, 3), rtol=0, atol=1e-13)


def test_low_pass_is_the_recursion_written_out():
    a, b = (-1.2, 0.4), (0.1, 0.06, 0.04)
    sequence = gradients(12, 3)
    chain = Chain([LowPass(a=a, b=b, bias_correction=True, applies_to="vectors")])
    m: dict[int, Tensor | float] = {}
    c: dict[int, float] = {}
    for t, gradient in enumerate(sequence):
        m[t] = sum(-a[i] * m.get(t - 1 - i, 0.0) for i in range(2))
        m[t] += sum(b[i] * sequence[t - i] for i in range(3) if t >= i)
        c[t] = sum(-a[i] * c.get(t - 1 - i, 0.0) for i in range(2)) + sum(b[i] for i in range(3) if t >= i)
        # The same sums in another order, in float64.
        torch.testing.assert_close(chain({"w": gradient})["w"], m[t] / c[t], rtol=1e-12, atol=1e-12)


def test_bias_correction_of_the_exponential_average_divides_by_one_minus_beta_to_the_t():
    plain = Chain([LowPass(applies_to="vectors")])
    corrected = Chain([LowPass(bias_correction=True, applies_to="vectors")])
    for t, gradient in enumerate(gradients(10, 3), start=1):
        expected = plain({"w": gradient})["w"] / (1 - 0.9**t)
        # float64 rounding.
        torch.testing.assert_close(corrected({"w": gradient})["w"], expected, rtol=1e-12, atol=0)


def kalman_gains(filter_: Kalman, steps: int) -> list[float]:
    """The gains as seen from outside: how far the estimate moves towards each measurement."""
    chain = Chain([filter_])
    estimate = torch.zeros(1, dtype=torch.float64)
    gains = []
    for gradient in gradients(steps, 1):
        new = chain({"w": gradient})["w"]
        gains.append(((new - estimate) / (gradient - estimate)).item())
        estimate = new
    return gains


def test_the_kalman_gain_starts_at_one_and_settles_at_0_686_for_a_noise_ratio_of_1_5():
    gains = kalman_gains(Kalman(process_to_measurement_ratio=1.5, applies_to="all"), 20)
    # The second gain by hand: P = 1 + 1.5, K = 2.5 / 3.5. float64 rounding, magnified by the quotient above.
    assert gains[:2] == pytest.approx([1.0, 2.5 / 3.5], abs=1e-9)
    assert gains[-1] == pytest.approx(0.686, abs=5e-4)  # the three digits given
    assert gains[-1] ** 2 + 1.5 * gains[-1] == pytest.approx(1.5, abs=1e-9)


def test_a_constant_kalman_gain_is_used_from_the_second_step_on():
    # float64 rounding, magnified by the quotient.
    assert kalman_gains(Kalman(gain=0.7, applies_to="all"), 4) == pytest.approx([1.0, 0.7, 0.7, 0.7], abs=1e-9)


def test_scale_gives_vectors_a_learning_rate_of_their_own():
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    result = Chain([Scale(15.0, applies_to="vectors")])({"matrix": matrix, "vector": vector})
    assert torch.equal(result["matrix"], matrix)
    assert torch.equal(result["vector"], 15 * vector)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Momentum(1.0), "beta"),
        (lambda: Momentum(-0.1), "beta"),
        (lambda: Momentum(kind="nesterov"), "kind"),
        (lambda: Momentum(applies_to="biases"), "applies_to"),
        (lambda: Orthogonalize(steps=0), "steps"),
        (lambda: Orthogonalize(coefficients="polar"), "coefficients"),
        (lambda: Orthogonalize(scale_cap=0.0), "scale_cap"),
        (lambda: MagnitudeScale(Scale(2.0, applies_to="all")), "matrices"),
        (lambda: LowPass(a=(0.9, 0.5, 2.0)), "unstable"),
        (lambda: LowPass(a=(-1.0,)), "unstable"),
        (lambda: LowPass(a=(float("nan"),)), "finite"),
        (lambda: LowPass(b=()), "b must"),
        (lambda: LowPass(b=(0.5, -0.5)), "b must"),
        (lambda: Kalman(), "exactly one"),
        (lambda: Kalman(gain=0.7, process_to_measurement_ratio=1.5), "exactly one"),
        (lambda: Kalman(gain=0.0), "gain"),
        (lambda: Kalman(process_to_measurement_ratio=0.0), "process_to_measurement_ratio"),
        (lambda: Scale(0.0), "factor"),
        (lambda: Scale(float("inf")), "factor"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_a_kalman_gain_above_one_is_refused_with_what_to_set_instead():
    with pytest.raises(ConfigurationError, match=r"amplifies the noise.*process_to_measurement_ratio.*0\.686"):
        Kalman(gain=1.5)
