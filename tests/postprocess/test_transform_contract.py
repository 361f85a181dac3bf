"""What every transform promises, checked on every transform."""

import io

import pytest
import torch

from dp_lightning.postprocess import Chain, Kalman, LowPass, MagnitudeScale, Momentum, Orthogonalize, Scale

TRANSFORMS = {
    "heavy_ball": lambda: Momentum(0.9),
    "heavy_ball_all": lambda: Momentum(0.9, applies_to="all"),
    "ema_nesterov": lambda: Momentum(0.95, kind="ema_nesterov"),
    "orthogonalize": Orthogonalize,
    "magnitude_scale": lambda: MagnitudeScale(Orthogonalize()),
    "magnitude_scale_of_momentum": lambda: MagnitudeScale(Momentum()),
    "low_pass": LowPass,
    "low_pass_corrected_all": lambda: LowPass(bias_correction=True, applies_to="all"),
    "low_pass_second_order": lambda: LowPass(a=(-1.2, 0.4), b=(0.1, 0.06, 0.04), bias_correction=True),
    "moving_average": lambda: LowPass(a=(), b=(0.5, 0.5)),
    "kalman_gain": lambda: Kalman(gain=0.7),
    "kalman_ratio_all": lambda: Kalman(process_to_measurement_ratio=1.5, applies_to="all"),
    "scale": lambda: Scale(2.0),
    "scale_vectors": lambda: Scale(2.0, applies_to="vectors"),
}

SHAPES = {"conv": (4, 3, 3, 3), "linear": (4, 27), "tall": (9, 2), "bias": (4,), "temperature": ()}


@pytest.fixture(params=TRANSFORMS)
def transform(request):
    return TRANSFORMS[request.param]()


def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_names_shapes_and_dtypes_are_kept(transform, dtype):
    chain = Chain([transform])
    for seed in range(3):
        gradients = draw(seed, dtype)
        result = chain(gradients)
        assert list(result) == list(gradients)
        for name, gradient in gradients.items():
            assert result[name].shape == gradient.shape
            assert result[name].dtype == dtype


def test_a_zero_gradient_gives_zero_at_every_step(transform):
    chain = Chain([transform])
    for _ in range(3):
        result = chain({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        assert all(torch.equal(value, torch.zeros_like(value)) for value in result.values())


def test_parameters_that_are_not_selected_pass_through_untouched(transform):
    gradients = draw(0)
    chain = Chain([transform])
    chain(draw(1))
    result = chain(gradients)
    for name, gradient in gradients.items():
        if ("matrices" if gradient.ndim >= 2 else "vectors") not in transform.kinds():
            assert result[name] is gradient


def test_a_saved_state_continues_identically(transform):
    first, second = Chain([transform]), Chain([transform])
    for seed in range(3):
        first(draw(seed))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        expected, actual = first(draw(seed)), second(draw(seed))
        assert all(torch.equal(expected[name], actual[name]) for name in SHAPES)


def test_overwriting_gradients_in_place_changes_neither_inputs_nor_later_steps(transform):
    """A training loop writes results back into `.grad` and zeroes it, in place."""
    careful, careless = Chain([transform]), Chain([transform])
    for seed in range(4):
        gradients = draw(seed)
        expected = careful(draw(seed))
        actual = careless(gradients)
        assert all(torch.equal(gradients[name], draw(seed)[name]) for name in SHAPES)
        assert all(torch.equal(expected[name], actual[name]) for name in SHAPES)
        for tensor in (*actual.values(), *gradients.values()):
            tensor.fill_(7.0)


def test_each_parameter_keeps_its_history_when_another_is_absent(transform):
    whole, partial = Chain([transform]), Chain([transform])
    for seed in range(3):
        gradients = draw(seed)
        expected = whole(gradients)
        absent = "tall" if seed == 1 else None
        actual = partial({name: value for name, value in gradients.items() if name != absent})
        for name in SHAPES.keys() - {"tall"}:
            # A batch of matrices may add in another order than before: float32 rounding.
            torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(actual["tall"]).all()


def test_what_ranks_may_deal_out_keeps_no_state(transform):
    chain = Chain([transform])
    chain(draw(0))
    (state,) = chain.state_dict().values()
    assert not [name for name in state if transform.cost(torch.Size(SHAPES[name])) > 0]


@pytest.mark.parametrize("name", ["orthogonalize", "magnitude_scale"])
def test_what_ranks_may_deal_out_depends_on_its_own_gradient_alone(name):
    transform, gradients = TRANSFORMS[name](), draw(0)
    together = Chain([transform])(gradients)
    for parameter, shape in SHAPES.items():
        assert (transform.cost(torch.Size(shape)) > 0) == (len(shape) > 1)
        alone = Chain([transform])({parameter: gradients[parameter]})
        torch.testing.assert_close(alone[parameter], together[parameter], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_loaded_on_the_cpu_follows_the_gradients_to_their_device(transform):
    chain, reference = Chain([transform]), Chain([transform])
    for seed in range(2):
        reference(draw(seed))
    chain.load_state_dict(reference.state_dict())
    result = chain({name: value.cuda() for name, value in draw(2).items()})
    expected = reference(draw(2))
    for name in SHAPES:
        assert result[name].is_cuda
        # The GPU adds in another order: float32 rounding.
        torch.testing.assert_close(result[name].cpu(), expected[name], atol=1e-4, rtol=1e-4)
