"""Shrinkage, gates and selection on planted signals, against what is known of them in closed form."""

import math

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    Momentum,
    Normalize,
    Orthogonalize,
    Scale,
    SelectiveOrthogonalize,
    SpectralShrinkage,
    map_singular_values,
    noise_edge,
    polar_factor,
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


@pytest.mark.parametrize("shape", [(16, 27), (64, 64), (144, 16)])
def test_noise_alone_passes_the_edge_once_in_a_hundred_draws(shape):
    draws = torch.randn(2000, *shape, generator=torch.Generator().manual_seed(0))
    above = (spectral_norm(draws) > noise_edge(*shape)).double().mean()
    # 20 expected; four standard deviations of that count, and the error of the limit at these sizes.
    assert 0.002 < float(above) < 0.02
    # The limit from above.
    assert 1 < noise_edge(*shape) / (math.sqrt(shape[0]) + math.sqrt(shape[1])) < 1.08


def test_without_noise_nothing_is_shrunk_and_everything_passes_the_gate():
    matrix = noise(6, 9)
    torch.testing.assert_close(apply(SpectralShrinkage(), matrix, 0.0), matrix)
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


def test_noise_alone_falls_back_to_a_step_of_norm_one_along_the_gradient():
    matrix = noise(16, 144)
    assert spectral_norm(matrix) < noise_edge(16, 144)
    torch.testing.assert_close(apply(GatedOrthogonalize(), matrix), matrix / matrix.norm())
    other = apply(GatedOrthogonalize(fallback=Scale(0.5)), matrix)
    torch.testing.assert_close(other, 0.5 * matrix)
    above = planted(16, 144, [5.0]) + matrix
    # One direction: a matrix of rank one and norm one, whatever the fallback.
    assert float(apply(GatedOrthogonalize(fallback=Scale(0.5)), above).norm()) == pytest.approx(1.0)


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


def test_a_part_that_remembers_or_chooses_is_refused():
    for part in (Momentum(0.9), Scale(2.0, applies_to="all"), Orthogonalize(include=["w"])):
        with pytest.raises(ConfigurationError, match="without memory, include and exclude"):
            SelectiveOrthogonalize(otherwise=part)
        with pytest.raises(ConfigurationError, match="GatedOrthogonalize: fallback"):
            GatedOrthogonalize(fallback=part)


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


def test_a_matrix_without_signal_rests_or_goes_through_the_fallback():
    weak, strong = noise(64, 128).float(), (planted(64, 128, [6.0]) + noise(64, 128)).float()
    assert spectral_norm(weak) < noise_edge(64, 128)
    chain = Chain([SpectralShrinkage(), Normalize()])
    result = chain({"a": weak, "b": strong}, noise=1.0)
    assert not result["a"].any()
    assert float(result["b"].norm()) == pytest.approx(8.0)
    torch.testing.assert_close(apply(SpectralShrinkage(fallback=Scale(0.5)), weak), 0.5 * weak)


def test_directions_of_rounding_alone_are_taken_for_zero():
    """Squared, a singular value of 1e-4 lies below the rounding of the largest in float32, and not in float64."""
    matrix = torch.diag(torch.tensor([1.0, 1e-2, 1e-4]))
    for dtype, last in ((torch.float32, 0.0), (torch.float64, 1.0)):
        result = map_singular_values(matrix.to(dtype), torch.ones_like)
        torch.testing.assert_close(result, torch.diag(torch.tensor([1.0, 1.0, last], dtype=dtype)))
