"""The noise level that a chain states against what is measured, and against closed forms."""

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    Chain,
    EntrywiseLinear,
    GatedOrthogonalize,
    Kalman,
    LowPass,
    MagnitudeScale,
    Memory,
    Momentum,
    NoiseNormalize,
    Normalize,
    Orthogonalize,
    Scale,
    SpectralShrinkage,
)
from dp_lightning.privacy.bands import deviations


class Decaying(EntrywiseLinear):
    """1/t of the sum of the gradients so far."""

    has_memory = True

    def step(self, value, memory, *, noise, shape):
        steps = memory.numbers.get("steps", 0) + 1
        total = memory.entries.get("total", torch.zeros_like(value)) + 2.0 * value - value * 1
        return total / steps, Memory({"total": total}, {"steps": steps})


def test_a_public_number_is_kept_exactly():
    third = 1 / 3

    class Thirds(EntrywiseLinear):
        def step(self, value, memory, *, noise, shape):
            assert memory.numbers.get("third", third) == third
            return value, Memory({}, {"third": third})

    transform, slots = Thirds(), {}
    for _ in range(2):
        _, slots = transform.advance(torch.ones(2), slots, noise=None, shape=torch.Size((2,)))


CHAINS = {
    "none": lambda: [],
    "own": lambda: [Decaying()],
    "low_pass_corrected": lambda: [LowPass(a=(-1.2, 0.4), b=(0.1, 0.06, 0.04), bias_correction=True)],
    "moving_average": lambda: [LowPass(a=(), b=(0.5, 0.3, 0.2))],
    "filter_and_momentum": lambda: [
        Kalman(process_to_measurement_ratio=1.5),
        Momentum(0.95, kind="ema_nesterov"),
        Scale(0.5),
    ],
    "three_with_memory": lambda: [LowPass(a=(-1.2, 0.4), b=(0.1, 0.1)), Kalman(gain=0.5), Momentum(0.9)],
    "normalize_before_momentum": lambda: [LowPass(bias_correction=True), NoiseNormalize(norm=2.0), Momentum(0.9)],
}
SIGMA = 0.7


@pytest.mark.parametrize("coefficients", [(1.0,), (0.8, 0.6), (0.6, 0.48, 0.64)])
@pytest.mark.parametrize("name", CHAINS)
def test_the_stated_noise_is_exact(name, coefficients):
    """Each step's own noise in a coordinate of its own: the length of the output is its standard deviation."""
    steps, resumes = 60, 20
    chain, written_out = Chain(CHAINS[name]()), Chain(CHAINS[name]())
    noise = torch.zeros(steps, steps, 1, dtype=torch.float64)  # y of each step
    for step in range(steps):
        if step in (0, resumes):  # a run that goes on, with fresh noise and another level
            chain.load_state_dict(chain.state_dict())
            chain.begin_noise(coefficients)
            written_out.begin_noise(coefficients)
        block, sigma = (0, SIGMA) if step < resumes else (resumes, 1.3)
        noise[step, step] = 1
        for back, coefficient in enumerate(coefficients[1:], 1):
            noise[step] -= coefficient * noise[step - back] if step - back >= block else 0
        noise[step] /= coefficients[0]
        # NoiseNormalize divides by the norm of a parameter of this shape in both.
        traced = written_out({"w": sigma * noise[step]}, noise=sigma)["w"]
        chain({"w": torch.zeros(steps, 1)}, noise=sigma)
        assert chain.noise["w"] == pytest.approx(float(traced.norm()), rel=1e-9), step


def test_each_parameter_has_the_noise_of_its_own_history():
    chain = Chain([Momentum(0.9, exclude=["head.*"]), Scale(2.0, applies_to="vectors")])
    both = {"body.w": torch.zeros(3, 3), "late.w": torch.zeros(3, 3), "head.w": torch.zeros(3, 3), "b": torch.zeros(3)}
    for step in range(5):
        given = {name: value for name, value in both.items() if name != "late.w" or step >= 3}
        chain(given, noise=1.0)
    assert chain.noise["body.w"] ** 2 == pytest.approx(sum(0.81**k for k in range(5)))
    assert chain.noise["late.w"] ** 2 == pytest.approx(sum(0.81**k for k in range(2)))
    assert chain.noise["head.w"] == 1.0
    assert chain.noise["b"] == 2.0


def test_the_noise_of_a_parameter_that_was_frozen_has_gone_on():
    chain = Chain([Scale(2.0, applies_to="all")])
    chain.begin_noise((0.8, 0.6))
    for step in range(5):
        chain({"early": torch.zeros(3), **({"late": torch.zeros(3)} if step >= 3 else {})}, noise=1.0)
    assert chain.noise["late"] == chain.noise["early"] == pytest.approx(2 * deviations((0.8, 0.6), 5)[-1])


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([], [1.0, 0.5, 0.25, 0.125]),
        ([Momentum(0.5), Orthogonalize(), Momentum(0.9, applies_to="vectors")], [1.0, 1.0, 0.75, 0.5]),
        ([LowPass(a=(), b=(0.5, 0.5)), Scale(3.0)], [0.5, 0.75, 0.375, 0.1875]),
    ],
)
def test_filters_turn_what_the_optimizer_makes_of_a_gradient_into_what_the_weights_get(transforms, expected):
    assert Chain(transforms).filtered([1.0, 0.5, 0.25, 0.125]) == pytest.approx(expected)


def test_behind_a_transform_that_is_not_linear_the_noise_is_not_known():
    chain = Chain([Orthogonalize(include=["a"]), Scale(2.0)])
    chain({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, noise=1.0)
    assert chain.noise == {"a": None, "b": 2.0}


def test_parameters_of_other_shapes_are_not_taken_for_alike():
    chain = Chain([NoiseNormalize(norm=1.0)])
    chain({"small": torch.zeros(2, 2), "large": torch.zeros(20, 20)}, noise=1.0)
    assert chain.noise == {"small": pytest.approx(0.5), "large": pytest.approx(0.05)}


SHAPES = {"net.weight": torch.Size((4, 5)), "net.bias": torch.Size((4,))}


@pytest.mark.parametrize(
    ("transforms", "noise", "message"),
    [
        ([Orthogonalize(), SpectralShrinkage()], 1.0, "SpectralShrinkage needs the noise .* before the transforms"),
        ([Normalize(), NoiseNormalize()], 1.0, "before the transforms that are not linear"),
        ([GatedOrthogonalize()], None, "Train with PrivacyCallback"),
        ([NoiseNormalize()], 0.0, "NoiseNormalize divides by the norm of the noise"),
        ([Orthogonalize(include=["net.wight"])], 1.0, r"matches net\.wight\. The names are such as net\.weight"),
        ([Momentum(include=["net.*"]), Momentum()], 1.0, r"applied twice to net\.weight"),
        ([Momentum(applies_to="all"), Momentum(applies_to="vectors")], 1.0, r"applied twice to net\.bias"),
        ([Momentum(), MagnitudeScale(Momentum())], 1.0, r"applied twice to net\.weight"),
        ([Orthogonalize(include=["*.bias"])], 1.0, "acts on no parameter"),
        ([Orthogonalize(exclude=["net.*"])], 1.0, "acts on no parameter"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(transforms, noise, message):
    with pytest.raises(ConfigurationError, match=message):
        Chain(transforms).check(SHAPES, noise=noise)
