"""What every transform promises, checked on every transform."""

import inspect
import io

import pytest
import torch
import written_out

from dp_lightning import postprocess
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    Kalman,
    LowPass,
    MagnitudeScale,
    Momentum,
    NoiseNormalize,
    Normalize,
    Orthogonalize,
    Scale,
    SelectiveOrthogonalize,
    SpectralShrinkage,
    Transform,
    denoise,
    newton_schulz,
)

# A transform, and what it is by the reference.
TRANSFORMS = {
    "heavy_ball": (lambda: Momentum(0.9), written_out.heavy_ball(0.9)),
    "heavy_ball_all": (lambda: Momentum(0.9, applies_to="all"), written_out.heavy_ball(0.9)),
    "ema_nesterov": (lambda: Momentum(0.95, kind="ema_nesterov"), written_out.ema_nesterov(0.95)),
    "orthogonalize": (Orthogonalize, written_out.quintic(written_out.MUON)),
    "orthogonalize_some": (lambda: Orthogonalize(exclude=["lin*"]), written_out.quintic(written_out.MUON)),
    "polar_express": (
        lambda: Orthogonalize(coefficients="polar_express", steps=5),
        written_out.quintic(written_out.POLAR_EXPRESS),
    ),
    "exact": (lambda: Orthogonalize(coefficients="exact"), written_out.exact),
    "magnitude_scale": (
        lambda: MagnitudeScale(Orthogonalize()),
        written_out.magnitude(written_out.quintic(written_out.MUON)),
    ),
    "magnitude_scale_of_momentum": (
        lambda: MagnitudeScale(Momentum()),
        written_out.magnitude(written_out.heavy_ball(0.9)),
    ),
    "low_pass": (LowPass, written_out.low_pass((-0.9,), (0.1,))),
    "low_pass_corrected_all": (
        lambda: LowPass(bias_correction=True, applies_to="all"),
        written_out.low_pass((-0.9,), (0.1,), corrected=True),
    ),
    "low_pass_second_order": (
        lambda: LowPass(a=(-1.2, 0.4), b=(0.1, 0.06, 0.04), bias_correction=True),
        written_out.low_pass((-1.2, 0.4), (0.1, 0.06, 0.04), corrected=True),
    ),
    "moving_average": (lambda: LowPass(a=(), b=(0.5, 0.5)), written_out.low_pass((), (0.5, 0.5))),
    "kalman_gain": (lambda: Kalman(gain=0.7), written_out.kalman(gain=0.7)),
    "kalman_ratio_all": (
        lambda: Kalman(process_to_measurement_ratio=1.5, applies_to="all"),
        written_out.kalman(ratio=1.5),
    ),
    "scale": (lambda: Scale(2.0), written_out.scale(2.0)),
    "scale_vectors": (lambda: Scale(2.0, applies_to="vectors"), written_out.scale(2.0)),
    "normalize": (Normalize, written_out.normalize()),
    "normalize_to_one": (lambda: Normalize(norm=1.0), written_out.normalize(1.0)),
    "noise_normalize": (NoiseNormalize, written_out.noise_normalize),
    "shrinkage": (SpectralShrinkage, written_out.shrinkage),
    "gated": (GatedOrthogonalize, written_out.gated),
    "selective_detection": (SelectiveOrthogonalize, written_out.selective("detection")),
    "selective_recovery": (lambda: SelectiveOrthogonalize(threshold="recovery"), written_out.selective("recovery")),
}

# Between them the matrices lie above and below every threshold of the transforms that look at the noise.
NOISE = 0.12

SHAPES = {
    "conv": (4, 3, 3, 3),
    "linear": (4, 27),
    "tall": (9, 2),
    "square": (12, 12),
    "weak": (4, 27),
    "wide": (20, 40),
    "bias": (4,),
    "temperature": (),
}


@pytest.fixture(params=TRANSFORMS)
def transform(request):
    return TRANSFORMS[request.param][0]()


def test_every_transform_of_the_package_is_here():
    public = {value for value in vars(postprocess).values() if inspect.isclass(value) and issubclass(value, Transform)}
    assert {type(make()) for make, _ in TRANSFORMS.values()} == {c for c in public if not inspect.isabstract(c)}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Gradients with the same few strong directions at every step, and noise."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {name: NOISE * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    fixed = torch.Generator().manual_seed(100)
    for name, strength in (("conv", 3.0), ("linear", 2.0), ("tall", 1.0), ("square", 1.5)):
        m, n = postprocess.as_matrix(gradients[name]).shape
        for factor in (1.0, 0.6):
            left, right = torch.randn(m, generator=fixed), torch.randn(n, generator=fixed)
            direction = torch.outer(left / left.norm(), right / right.norm())
            gradients[name] = gradients[name] + strength * factor * direction.view(SHAPES[name])
    return {name: gradient.to(dtype) for name, gradient in gradients.items()}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_transform_is_what_the_reference_says(name, dtype):
    make, expected = TRANSFORMS[name]
    transform = make()
    chain = Chain([transform])
    history = []
    for seed in range(4):
        history.append(draw(seed, dtype))
        result = chain(history[-1], noise=NOISE)
        for parameter, shape in SHAPES.items():
            gradients = [step[parameter].double() for step in history]
            chosen = transform.selects(parameter, shape)
            value = expected(gradients, [NOISE] * len(gradients)) if chosen else gradients[-1]
            # Rounding, magnified by the slope of five Newton-Schulz steps (485) and by squared singular values.
            tolerance = 2e-4 if dtype == torch.float32 else 1e-8
            torch.testing.assert_close(result[parameter].double(), value, rtol=tolerance, atol=tolerance)


def test_the_examples_lie_on_both_sides_of_every_threshold():
    for threshold in ("detection", "recovery"):
        transform = SelectiveOrthogonalize(threshold=threshold)
        seen = postprocess.matrix.map_same_shape(
            transform._shows,
            {name: value for name, value in draw(0).items() if value.ndim > 1},
            dict.fromkeys(SHAPES, NOISE),
        )
        assert {bool(value) for value in seen.values()} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_names_shapes_and_dtypes_are_kept_and_parameters_that_are_not_selected(transform, dtype):
    chain = Chain([transform])
    for seed in range(3):
        gradients = draw(seed, dtype)
        result = chain(gradients, noise=NOISE)
        assert list(result) == list(gradients)
        for name, gradient in gradients.items():
            assert result[name].shape == gradient.shape
            assert result[name].dtype == dtype
            assert result[name].isfinite().all()
            assert transform.selects(name, gradient.shape) or result[name] is gradient


def test_a_zero_gradient_gives_zero_at_every_step(transform):
    chain = Chain([transform])
    for _ in range(3):
        result = chain({name: torch.zeros(shape) for name, shape in SHAPES.items()}, noise=NOISE)
        assert all(torch.equal(value, torch.zeros_like(value)) for value in result.values())


def test_a_saved_state_continues_identically(transform):
    first, second = Chain([transform]), Chain([transform])
    for seed in range(3):
        first(draw(seed), noise=NOISE)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        expected, actual = first(draw(seed), noise=NOISE), second(draw(seed), noise=NOISE)
        assert all(torch.equal(expected[name], actual[name]) for name in SHAPES)
        assert first.noise == second.noise


def test_overwriting_gradients_in_place_changes_neither_inputs_nor_later_steps(transform):
    """A training loop writes results back into `.grad` and zeroes it, in place."""
    careful, careless = Chain([transform]), Chain([transform])
    for seed in range(4):
        gradients = draw(seed)
        expected = careful(draw(seed), noise=NOISE)
        actual = careless(gradients, noise=NOISE)
        assert all(torch.equal(gradients[name], draw(seed)[name]) for name in SHAPES)
        assert all(torch.equal(expected[name], actual[name]) for name in SHAPES)
        for tensor in (*actual.values(), *gradients.values()):
            tensor.fill_(7.0)


def test_each_parameter_keeps_its_history_when_another_is_absent(transform):
    whole, partial = Chain([transform]), Chain([transform])
    for seed in range(3):
        gradients = draw(seed)
        expected = whole(gradients, noise=NOISE)
        absent = "tall" if seed == 1 else None
        actual = partial({name: value for name, value in gradients.items() if name != absent}, noise=NOISE)
        for name in SHAPES.keys() - {"tall"}:
            # A batch of matrices may add in another order than before: float32 rounding.
            torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(actual["tall"]).all()


def test_no_transform_reads_the_device(transform):
    """Tensors without memory raise where a number is read."""
    chain = Chain([transform])
    for seed in range(2):
        found = chain({name: value.to("meta") for name, value in draw(seed).items()}, noise=NOISE)
    assert all(value.device.type == "meta" for value in found.values())


@pytest.mark.parametrize("name", ["selective_detection", "gated", "shrinkage"])
def test_a_device_decides_as_a_cpu_does(monkeypatch, name):
    make, _ = TRANSFORMS[name]
    here = Chain([make()])(draw(0), noise=NOISE)
    monkeypatch.setattr(denoise, "read_at_once", lambda device: False)
    torch.testing.assert_close(Chain([make()])(draw(0), noise=NOISE), here)


@pytest.mark.gpu
def test_a_state_loaded_on_the_cpu_follows_the_gradients_to_their_device(transform):
    chain, on_cpu = Chain([transform]), Chain([transform])
    for seed in range(2):
        on_cpu(draw(seed), noise=NOISE)
    chain.load_state_dict(on_cpu.state_dict())
    result = chain({name: value.cuda() for name, value in draw(2).items()}, noise=NOISE)
    expected = on_cpu(draw(2), noise=NOISE)
    for name in SHAPES:
        assert result[name].is_cuda
        # The GPU adds in another order: float32 rounding.
        torch.testing.assert_close(result[name].cpu(), expected[name], atol=1e-4, rtol=1e-4)


def sequence_of(steps, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, generator=generator) for _ in range(steps)]


def descend(optimizer_class, sequence, transforms, **settings):
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


@pytest.mark.parametrize("shape", [(24, 16), (64, 144)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_dp_muon_with_sgd_is_torch_muon(shape, precision):
    sequence = sequence_of(5, *shape, dtype=torch.float32)
    transforms = [Momentum(0.95, kind="ema_nesterov"), Orthogonalize(precision=precision)]
    ours = descend(torch.optim.SGD, sequence, transforms, lr=0.02)
    settings = {"weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "original"}
    theirs = descend(torch.optim.Muon, sequence, [], lr=0.02, **settings)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
        # torch.optim.Muon iterates in bfloat16 (eps 0.0078) and adds in another order: 0.9 to 1.8 % seen.
        assert (a - b).norm() < 0.03 * a.norm(), step


def test_doppler_sgd_at_ten_times_the_rate_is_dp_sgd_with_momentum():
    sequence = sequence_of(50, 6, 7)
    doppler = descend(torch.optim.SGD, sequence, [LowPass()], lr=3.0)
    dp_sgd = descend(torch.optim.SGD, sequence, [], lr=0.3, momentum=0.9)
    # Equal in exact arithmetic; float64 rounding over 50 steps of size one is below 1e-13.
    torch.testing.assert_close(doppler, dp_sgd, atol=1e-12, rtol=0)


def test_the_kalman_gain_starts_at_one_and_settles_at_0_686_for_a_noise_ratio_of_1_5():
    chain, gains = Chain([Kalman(process_to_measurement_ratio=1.5, applies_to="all")]), []
    estimate = torch.zeros(1, dtype=torch.float64)
    for gradient in sequence_of(20, 1):
        before, estimate = estimate, chain({"w": gradient})["w"]
        gains.append(((estimate - before) / (gradient - before)).item())  # how far it moves to each measurement
    # The second gain by hand: P = 1 + 1.5, K = 2.5 / 3.5. float64 rounding, magnified by the quotient above.
    assert gains[:2] == pytest.approx([1.0, 2.5 / 3.5], abs=1e-9)
    assert gains[-1] == pytest.approx(0.686, abs=5e-4)  # the three digits given


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Momentum(1.0), "beta"),
        (lambda: Momentum(kind="nesterov"), "kind"),
        (lambda: Momentum(applies_to="biases"), "applies_to"),
        (lambda: Orthogonalize(include="w"), "include must be a list"),
        (lambda: Orthogonalize(precision="float16"), "precision"),
        (lambda: Orthogonalize(steps=0), "steps"),
        (lambda: Orthogonalize(coefficients="polar"), "coefficients"),
        (lambda: MagnitudeScale(Scale(2.0, applies_to="all")), "matrices"),
        (lambda: LowPass(a=(0.9, 0.5, 2.0)), "unstable"),
        (lambda: LowPass(a=(float("nan"),)), "finite"),
        (lambda: LowPass(b=(0.5, -0.5)), "b must"),
        (lambda: Kalman(), "exactly one"),
        (lambda: Kalman(gain=0.0), "gain"),
        (lambda: Kalman(process_to_measurement_ratio=0.0), "process_to_measurement_ratio"),
        (lambda: Kalman(gain=1.5), r"amplifies the noise.*process_to_measurement_ratio.*0\.686"),
        (lambda: Scale(0.0), "factor"),
        (lambda: SelectiveOrthogonalize(threshold="bbp"), "threshold"),
        (lambda: Normalize(norm=0.0), "norm"),
        (lambda: Normalize(scale_cap=0.0).norm_of((2, 3)), "scale_cap"),
        (lambda: NoiseNormalize(norm=float("inf")), "norm"),
        (lambda: newton_schulz(torch.ones(2, 3), coefficients=(1.0, 2.0)), "coefficients"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()
