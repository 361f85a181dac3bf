"""Shrinkage, gates and selection on planted signals, against what is known of them in closed form."""

import math
import warnings

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    MagnitudeScale,
    Momentum,
    NoiseNormalize,
    Normalize,
    Orthogonalize,
    Scale,
    SelectiveOrthogonalize,
    SpectralShrinkage,
    map_singular_values,
    noise_edge,
    polar_factor,
    power_iteration,
    signal_values,
    singular_values,
    spectral_norm,
)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(m, n, strengths, seed=0):
    """Singular values in units of the detection threshold (m n)^(1/4) of unit noise."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, len(strengths), generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, len(strengths), generator=generator, dtype=torch.float64)).Q
    return (left * (m * n) ** 0.25 * torch.tensor(strengths, dtype=torch.float64)) @ right.T


def cosine(first, second):
    return float(torch.nn.functional.cosine_similarity(first.double().flatten(), second.flatten(), dim=0))


def apply(transform, matrix, level=1.0):
    return Chain([transform])({"w": matrix}, noise=level)["w"]


@pytest.mark.parametrize("shape", [(16, 27), (64, 576), (64, 64), (576, 64)])
def test_noise_alone_passes_the_edge_once_in_a_hundred_draws(shape):
    draws = torch.randn(2000, *shape, generator=torch.Generator().manual_seed(0))
    above = (spectral_norm(draws) > noise_edge(*shape)).double().mean()
    # 20 expected; four standard deviations of that count, and the error of the limit at these sizes.
    assert 0.002 < float(above) < 0.02
    # The limit from above.
    assert 1 < noise_edge(*shape) / (math.sqrt(shape[0]) + math.sqrt(shape[1])) < 1.08


def expected_error(m, n, strength):
    """Squared Frobenius error of the best shrinkage of one singular value, over its square."""
    beta = min(m, n) / max(m, n)
    z2 = strength**2 * math.sqrt(beta)
    left, right = (z2**2 - beta) / (z2**2 + beta * z2), (z2**2 - beta) / (z2**2 + z2)
    return 1 - left * right


@pytest.mark.parametrize("shape", [(128, 1152), (256, 2304), (576, 64)])
@pytest.mark.parametrize("strengths", [[2.0], [3.0], [6.0], [5.0, 4.0, 3.0, 2.5, 2.0]])
def test_shrinkage_reaches_its_closed_form_error(shape, strengths):
    errors = []
    for seed in range(12):
        signal = planted(*shape, strengths, seed)
        estimate = apply(SpectralShrinkage(), (signal + noise(*shape, seed=100 + seed)).float()).double()
        errors.append(float((estimate - signal).square().sum() / signal.square().sum()))
    weights = [s * s for s in strengths]
    expected = sum(w * expected_error(*shape, s) for w, s in zip(weights, strengths, strict=True)) / sum(weights)
    # The formulas are limits: 2 % of the signal's energy at these sizes.
    assert sum(errors) / len(errors) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("loss", ["frobenius", "operator", "nuclear"])
def test_no_other_size_of_a_singular_value_is_better(loss):
    """The shrinker's own loss grows when its singular value is made larger or smaller."""
    m, n, strength = 200, 800, 2.0
    order = {"frobenius": "fro", "operator": 2, "nuclear": "nuc"}[loss]
    totals = dict.fromkeys((0.92, 1.0, 1.08), 0.0)
    for seed in range(5):
        signal = planted(m, n, [strength], seed)
        estimate = apply(SpectralShrinkage(loss=loss), signal + noise(m, n, seed=100 + seed))
        for factor in totals:
            totals[factor] += float(torch.linalg.matrix_norm(factor * estimate - signal, ord=order))
    assert min(totals, key=totals.get) == 1.0


def test_the_signal_behind_a_singular_value_is_found():
    m, n = 300, 1200
    found = [
        float(
            signal_values(spectral_norm(planted(m, n, [2.0], s) + noise(m, n, seed=9 + s))[None], m, n, torch.ones(()))[
                0
            ]
        )
        for s in range(8)
    ]
    assert sum(found) / 8 == pytest.approx(2.0 * (m * n) ** 0.25, rel=0.02)
    below = signal_values(torch.tensor([0.99 * (math.sqrt(m) + math.sqrt(n))]), m, n, torch.ones(()))
    assert float(below) == 0.0


def test_without_noise_nothing_is_shrunk_and_everything_passes_the_gate():
    matrix = noise(6, 9)
    for loss in ("frobenius", "operator", "nuclear"):
        torch.testing.assert_close(apply(SpectralShrinkage(loss=loss), matrix, 0.0), matrix)
    torch.testing.assert_close(apply(GatedOrthogonalize(), matrix, 0.0), polar_factor(matrix))
    for threshold in ("detection", "recovery"):
        result = apply(SelectiveOrthogonalize(threshold=threshold), planted(6, 9, [3.0, 1.0]), 0.0)
        torch.testing.assert_close(result, apply(Orthogonalize(), planted(6, 9, [3.0, 1.0])))


@pytest.mark.parametrize("shape", [(64, 576), (128, 576)])
@pytest.mark.parametrize("strength", [1.3, 1.7, 2.0])
def test_between_detection_and_recovery_the_gate_finds_what_orthogonalization_buries(shape, strength):
    gated, plain = [], []
    for seed in range(6):
        signal = planted(*shape, [strength], seed)
        noisy = (signal + noise(*shape, seed=100 + seed)).float()
        gated.append(cosine(apply(GatedOrthogonalize(), noisy), polar_factor(signal)))
        plain.append(cosine(apply(Orthogonalize(), noisy), polar_factor(signal)))
    assert sum(gated) > 2.5 * sum(plain)


@pytest.mark.parametrize("shape", [(16, 144), (64, 64)])
def test_where_every_direction_is_far_above_the_noise_the_gate_is_the_polar_factor(shape):
    signal = planted(*shape, [30.0] * min(shape))
    noisy = signal + noise(*shape, seed=5)
    gated, plain = apply(GatedOrthogonalize(), noisy), apply(Orthogonalize(coefficients="exact"), noisy)
    torch.testing.assert_close(gated, plain)
    assert cosine(gated, polar_factor(signal)) > 0.99


def test_noise_alone_falls_back_to_a_step_of_norm_one_along_the_gradient():
    matrix = noise(16, 144)
    assert spectral_norm(matrix) < noise_edge(16, 144)
    torch.testing.assert_close(apply(GatedOrthogonalize(), matrix), matrix / matrix.norm())
    other = apply(GatedOrthogonalize(fallback=Scale(0.5)), matrix)
    torch.testing.assert_close(other, 0.5 * matrix)
    above = planted(16, 144, [5.0]) + matrix
    # One direction: a matrix of rank one and norm one, whatever the fallback.
    assert float(apply(GatedOrthogonalize(fallback=Scale(0.5)), above).norm()) == pytest.approx(1.0)


def test_the_full_norm_of_an_update_is_restored_by_normalize():
    above = planted(16, 144, [5.0]) + noise(16, 144)
    result = Chain([GatedOrthogonalize(), Normalize()])({"w": above}, noise=1.0)["w"]
    assert float(result.norm()) == pytest.approx(4.0)
    assert float(apply(Orthogonalize(coefficients="exact"), above).norm()) == pytest.approx(4.0)


@pytest.mark.parametrize(("threshold", "turning"), [("detection", 1.0), ("recovery", 2.04)])
def test_selection_turns_at_its_threshold(threshold, turning):
    """The share of matrices that are orthogonalized rises through one half near the threshold of theory."""
    m, n = 128, 1152
    # Wedin's sqrt(m) + sqrt(n) in units of the detection threshold is 2.31; the second direction is noise.
    turning = turning if threshold == "detection" else (math.sqrt(m) + math.sqrt(n)) / (m * n) ** 0.25
    shares = []
    for strength in (0.75 * turning, 1.3 * turning):
        chosen = 0
        for seed in range(10):
            matrix = planted(m, n, [strength], seed) + noise(m, n, seed=50 + seed)
            result = apply(SelectiveOrthogonalize(threshold=threshold, otherwise=Scale(1.0)), matrix.float())
            chosen += int(not torch.equal(result, matrix.float()))
        shares.append(chosen)
    assert shares[0] <= 2
    assert shares[1] >= 9


def test_selection_steps_alike_in_size_on_both_sides_for_noise():
    """The linear step of noise has the norm of an orthogonalized matrix, up to the band of Newton-Schulz."""
    below, above = noise(64, 576), planted(64, 576, [6.0]) + noise(64, 576)
    sizes = [float(apply(SelectiveOrthogonalize(), matrix).norm()) for matrix in (below, above)]
    assert sizes[0] == pytest.approx(8.0, rel=0.02)
    # One strong direction leaves the others behind.
    assert 5.5 < sizes[1] < 9.0


def test_a_part_that_remembers_or_chooses_is_refused():
    for part in (Momentum(0.9), Scale(2.0, applies_to="all"), Orthogonalize(include=["w"])):
        with pytest.raises(ConfigurationError, match="without memory, include and exclude"):
            SelectiveOrthogonalize(otherwise=part)
        with pytest.raises(ConfigurationError, match="GatedOrthogonalize: fallback"):
            GatedOrthogonalize(fallback=part)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SpectralShrinkage(loss="huber"), "loss"),
        (lambda: GatedOrthogonalize(scale_cap=0.0), "scale_cap"),
        (lambda: SelectiveOrthogonalize(threshold="bbp"), "threshold"),
        (lambda: Normalize(norm=0.0), "norm"),
        (lambda: NoiseNormalize(norm=float("inf")), "norm"),
        (lambda: NoiseNormalize(scale_cap=-1.0), "scale_cap"),
        (lambda: Orthogonalize(precision="float16"), "precision"),
        (lambda: MagnitudeScale(Orthogonalize(), method="guess"), "method"),
        (lambda: Orthogonalize(include="w"), "include must be a list"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_a_transform_called_without_the_noise_says_so():
    for transform in (SpectralShrinkage(), GatedOrthogonalize(), SelectiveOrthogonalize(), NoiseNormalize()):
        with pytest.raises(ConfigurationError, match="PrivacyCallback"):
            Chain([transform])({"w": noise(3, 4)})


@pytest.mark.parametrize("beta", [0.9, 0.95])
def test_normalizing_by_the_noise_gives_steps_of_one_size_whatever_the_noise_is(beta):
    for level in (1e-6, 1.0, 50.0):
        chain = Chain([Momentum(beta, kind="ema_nesterov"), NoiseNormalize()])
        for step in range(30):
            result = chain(
                {"conv": level * noise(32, 16, 3, 3, seed=step), "tall": level * noise(90, 10, seed=step)}, noise=level
            )
            # Known to 1 / sqrt(2 * 4608) of its size.
            assert float(result["conv"].norm()) == pytest.approx(math.sqrt(32), rel=0.05)
            assert float(result["tall"].norm()) == pytest.approx(3 * math.sqrt(10), rel=0.1)


@pytest.mark.parametrize("shape", [(3, 16, 144), (2, 144, 16), (12, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-7)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_functions_of_singular_values_equal_those_of_a_decomposition(shape, dtype, tolerance, scale):
    matrix = (scale * noise(*shape)).to(dtype)
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = singular_values(matrix).double()
    torch.testing.assert_close(values / scale, s.flip(-1) / scale, rtol=tolerance, atol=tolerance)
    result = map_singular_values(matrix, lambda v: (v / scale) ** 2 + 1)
    expected = (u * ((s / scale) ** 2 + 1).unsqueeze(-2)) @ vh
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=100 * tolerance)


def test_power_iteration_never_exceeds_the_norm_and_states_its_error():
    matrix = noise(5, 40, 90)
    exact = spectral_norm(matrix)
    value, vector = torch.zeros(5), None
    for _ in range(60):
        before = value
        value, vector, residual = power_iteration(matrix, vector, steps=2)
        assert (value <= exact * (1 + 1e-12)).all()
        assert (value >= before - 1e-9).all()
        # Some singular value lies within the residual.
        distance = (torch.linalg.svdvals(matrix) ** 2 - value[:, None] ** 2).abs().amin(1)
        assert (distance <= residual + 1e-9).all()
    torch.testing.assert_close(value, exact, rtol=1e-3, atol=0)
    value, vector, residual = power_iteration(torch.zeros(3, 4))
    assert (float(value), float(residual)) == (0.0, 0.0)
    assert vector.isfinite().all()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_power_iteration_does_not_overflow(scale):
    matrix = planted(20, 60, [8.0]).float()
    value, _, _ = power_iteration(scale * matrix, steps=20)
    assert float(value / scale) == pytest.approx(float(spectral_norm(matrix)), rel=1e-4)


@pytest.mark.parametrize(("strength", "most", "mean"), [(4.0, 0.001, 0.001), (0.0, 0.15, 0.06)])
def test_the_magnitude_by_power_iteration_is_as_close_as_stated(strength, most, mean):
    """A momentum of one leading direction, and of noise alone."""
    shape, errors = (64, 576), []
    exact, power = (
        Chain([Momentum(0.9), MagnitudeScale(Orthogonalize(), method=method)]) for method in ("exact", "power")
    )
    for step in range(40):
        gradient = {"w": planted(*shape, [strength]) + noise(*shape, seed=step)}
        ratio = float(power(gradient)["w"].norm() / exact(gradient)["w"].norm())
        if step >= 5:
            errors.append(1 - ratio)
    assert min(errors) > -1e-9
    assert max(errors) < most
    assert sum(errors) / len(errors) < mean


@pytest.mark.parametrize("shape", [(64, 64), (3, 3), (200, 10)])
@pytest.mark.parametrize("norm", [None, 5.0, 1e30])
def test_a_matrix_of_zeros_stays_zero_whatever_norm_is_asked_for(shape, norm):
    result = Chain([Normalize(norm=norm)])({"w": torch.zeros(shape)})["w"]
    assert torch.equal(result, torch.zeros(shape))


def test_a_matrix_without_signal_rests_and_a_network_of_such_is_warned_of():
    weak, strong = noise(64, 128).float(), (planted(64, 128, [6.0]) + noise(64, 128)).float()
    assert spectral_norm(weak) < noise_edge(64, 128)
    chain = Chain([SpectralShrinkage(), Normalize()])
    with pytest.warns(UserWarning, match="none of them moves"):
        result = chain({"a": weak, "b": weak}, noise=1.0)
    assert all(torch.equal(value, torch.zeros(64, 128)) for value in result.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = chain({"a": weak, "b": strong}, noise=1.0)
        assert not result["a"].any()
        assert float(result["b"].norm()) == pytest.approx(8.0)
        with_fallback = Chain([SpectralShrinkage(fallback=Scale(0.5))])
        torch.testing.assert_close(with_fallback({"a": weak}, noise=1.0)["a"], 0.5 * weak)


def test_a_singular_value_of_noise_passes_the_shrinkage_as_seldom_as_the_gate():
    draws = torch.randn(500, 16, 144, generator=torch.Generator().manual_seed(1))
    passed = sum(bool(apply(SpectralShrinkage(fallback=Scale(1.0)), draw).equal(draw)) for draw in draws)
    assert 480 <= passed < 500


def test_a_noise_far_below_the_gradient_changes_nothing():
    matrix = noise(8, 12).float()
    for loss in ("frobenius", "operator", "nuclear"):
        torch.testing.assert_close(apply(SpectralShrinkage(loss=loss), matrix, 1e-30), matrix, rtol=1e-4, atol=1e-4)


def test_directions_of_rounding_alone_are_taken_for_zero():
    """Squared, a singular value of 1e-4 lies below the rounding of the largest in float32, and not in float64."""
    matrix = torch.diag(torch.tensor([1.0, 1e-2, 1e-4]))
    for dtype, last in ((torch.float32, 0.0), (torch.float64, 1.0)):
        result = map_singular_values(matrix.to(dtype), torch.ones_like)
        torch.testing.assert_close(result, torch.diag(torch.tensor([1.0, 1.0, last], dtype=dtype)))
