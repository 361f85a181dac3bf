"""Newton-Schulz, the polar factor and the spectral norm against independent references."""

import math

import pytest
import torch
import written_out

from dp_lightning.postprocess import Scale, as_matrix, dimension_scale, newton_schulz, polar_factor
from dp_lightning.postprocess.matrix import is_matrix
from dp_lightning.postprocess.newton_schulz import polar_express

SHAPES = [(64, 576), (576, 64), (10, 64), (16, 27)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 64), True),
        ((16, 3, 3, 3), True),
        ((2, 2), True),
        ((), False),
        ((64,), False),
        ((64, 1, 1, 1), False),
        ((1, 1, 192), False),
        ((1, 65, 192), False),
        ((1, 64), False),
        ((0, 5), False),
    ],
)
def test_what_has_one_long_side_is_a_vector(shape, expected):
    assert is_matrix(shape) == expected
    scale = Scale(2.0, applies_to="matrices")
    assert scale.selects("weight", shape) == expected
    assert Scale(2.0, applies_to="vectors").selects("weight", shape) != expected


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


# cos(X_k, U V^T) for k = 0 to 5 on gradients of ResNet-18 (Shanmugam et al. 2026, table of Newton-Schulz convergence).
CONVERGENCE = {
    (64, 147): (0.550, 0.653, 0.806, 0.939, 0.983, 0.985),
    (128, 576): (0.631, 0.731, 0.866, 0.964, 0.982, 0.986),
    (512, 4608): (0.123, 0.295, 0.367, 0.484, 0.585, 0.667),
    (10, 512): (0.460, 0.791, 0.910, 0.933, 0.938, 0.934),
}


# Powers with which the cosine at k = 0 is that of the table.
@pytest.mark.parametrize(
    ("shape", "decay"), [((64, 147), 0.871), ((128, 576), 0.683), ((512, 4608), 1.349), ((10, 512), 2.073)]
)
def test_newton_schulz_converges_on_decaying_spectra_as_the_papers_table_does(shape, decay):
    # A cosine with the polar factor follows from the singular values alone, here 1, 2^-decay, 3^-decay, ...
    matrix = torch.diag(torch.arange(1, min(shape) + 1).double() ** -decay)
    polar = polar_factor(matrix).flatten()
    found = [torch.cosine_similarity(matrix.flatten(), polar, dim=0)]
    found += [torch.cosine_similarity(newton_schulz(matrix, steps=k).flatten(), polar, dim=0) for k in range(1, 6)]
    assert float(found[0]) == pytest.approx(CONVERGENCE[shape][0], abs=0.002)
    # The spectra of those gradients are not known; a power of the same start stays within this of them.
    for ours, theirs in zip(found, CONVERGENCE[shape], strict=True):
        assert float(ours) == pytest.approx(theirs, abs=0.13)
    # A spectrum that falls fast converges slowly, and noise fast: not the other way round.
    assert (float(found[5]) < 0.8) == (shape == (512, 4608))


def test_the_polar_express_polynomials_are_the_published_ones():
    ours = polar_express(8)
    for step, (a, b, c) in enumerate(written_out.PUBLISHED):
        # Remez to convergence in float64; ours leave one per cent of room in all steps but the last.
        assert (1.01 * ours[step][0], 1.01**3 * ours[step][1], 1.01**5 * ours[step][2]) == pytest.approx(
            (a, b, c), rel=1e-9
        )
    # The limit of a narrow interval around one.
    assert ours[7] == pytest.approx((1.875, -1.25, 0.375), rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_polar_express_converges(shape):
    matrix = gaussian(*shape)
    for steps, most in ((5, 0.14), (6, 0.01), (8, 1e-5)):
        values = torch.linalg.svdvals(newton_schulz(matrix, steps=steps, coefficients="polar_express"))
        assert (values - 1).abs().max() < most
    torch.testing.assert_close(
        newton_schulz(matrix, steps=8, coefficients="polar_express"), polar_factor(matrix), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("coefficients", ["muon", "polar_express"])
def test_half_precision_is_right_to_two_per_cent(coefficients):
    matrix = gaussian(64, 576)
    exact = newton_schulz(matrix, coefficients=coefficients)
    half = newton_schulz(matrix, coefficients=coefficients, dtype=torch.bfloat16)
    assert half.dtype == torch.float32
    # bfloat16 has 8 bits; seen: 1.1 %.
    assert (half - exact).norm() < 0.02 * exact.norm()
    assert not torch.equal(half, exact)


def test_newton_schulz_forgets_the_scale_down_to_the_smallest_numbers():
    matrix = gaussian(8, 20)
    for scale in (1e-30, 1e-3, 1e30):
        # Only the rounding of the scaled entries differs.
        torch.testing.assert_close(newton_schulz(scale * matrix), newton_schulz(matrix), atol=1e-5, rtol=0)


def test_newton_schulz_takes_its_own_coefficients():
    # The cubic 1.5 s - 0.5 s^3 converges to one, quadratically near it; 30 steps are ample for this spectrum.
    result = newton_schulz(gaussian(8, 20, dtype=torch.float64), steps=30, coefficients=(1.5, -0.5, 0.0))
    torch.testing.assert_close(result, polar_factor(gaussian(8, 20, dtype=torch.float64)), atol=1e-12, rtol=0)


def test_the_polar_factor_has_orthonormal_rows_and_a_positive_semidefinite_partner():
    matrix = gaussian(5, 9, dtype=torch.float64)
    factor = polar_factor(matrix)
    # float64 rounding of a few products of size ten.
    torch.testing.assert_close(factor @ factor.mT, torch.eye(5, dtype=torch.float64), atol=1e-12, rtol=0)
    symmetric = matrix @ factor.mT
    torch.testing.assert_close(symmetric, symmetric.mT, atol=1e-12, rtol=0)
    assert torch.linalg.eigvalsh(symmetric).min() > 0


def test_the_polar_factor_leaves_null_directions_at_zero():
    matrix = torch.outer(gaussian(5), gaussian(7))
    values = torch.linalg.svdvals(polar_factor(matrix))
    # float32 rounding.
    torch.testing.assert_close(values, torch.tensor([1.0, 0, 0, 0, 0]), atol=1e-6, rtol=0)


def test_a_convolution_kernel_is_viewed_as_out_by_everything_else():
    kernel = gaussian(4, 3, 2, 2)
    assert as_matrix(kernel).shape == (4, 12)
    assert torch.equal(as_matrix(kernel)[1], kernel[1].reshape(-1))
    with pytest.raises(ValueError, match="two or more dimensions"):
        as_matrix(gaussian(4))


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((64, 64, 3, 3), 1.0), ((64, 16), 2.0), ((64, 3, 1, 1), 4.0), ((12, 4), math.sqrt(3))],
)
def test_the_dimension_scale_grows_with_tall_matrices_up_to_the_cap(shape, scale):
    assert dimension_scale(shape) == pytest.approx(scale, rel=1e-12)  # two float64 operations
    assert dimension_scale(shape, cap=1.5) == pytest.approx(min(scale, 1.5), rel=1e-12)
