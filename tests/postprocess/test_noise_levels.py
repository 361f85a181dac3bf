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


@pytest.mark.parametrize("name", CHAINS)
def test_the_stated_noise_is_exact(name):
    """Each step's noise in a coordinate of its own: the length of the output is its standard deviation."""
    steps = 60
    chain, written_out = Chain(CHAINS[name]()), Chain(CHAINS[name]())
    for step in range(steps):
        # A run that goes on after a change of its plan has another noise.
        sigma = SIGMA if step < 20 else 1.3
        impulse = torch.zeros(steps, 1, dtype=torch.float64)
        impulse[step] = sigma
        # NoiseNormalize divides by the norm of a parameter of this shape in both.
        traced = written_out({"w": impulse}, noise=sigma)["w"]
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
