"""The clipped sum equals a float64 loop over single examples."""

import pytest
import timm
import torch
from reference import clipped_sum_by_loop, relative_error
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.models import ResNet, SmallCNN, WideResNet
from dp_lightning.privacy import ClipPlan, clipped_gradient_sum

PLANS = {
    "flat-abadi": ClipPlan.flat(max_grad_norm=1.0),
    "flat-automatic": ClipPlan.flat(max_grad_norm=0.7, factor="automatic"),
    "per-layer-abadi": ClipPlan.per_layer(max_grad_norm=1.0),
    "per-layer-automatic": ClipPlan.per_layer(max_grad_norm=2.0, factor="automatic"),
}
MODELS = {
    "wrn": (lambda: WideResNet(16, 4, 10), (3, 32, 32)),
    "wrn-de-et-al": (
        lambda: WideResNet(10, 2, 10, weight_standardization=True, relu_first=True),
        (3, 16, 16),
    ),
    "resnet18-cifar": (lambda: ResNet(18, 10, stem="cifar"), (3, 16, 16)),
    "resnet18-imagenet": (lambda: ResNet(18, 10, stem="imagenet"), (3, 64, 64)),
    "small-cnn": (lambda: SmallCNN(10, in_channels=1, image_size=8), (1, 8, 8)),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10), (3, 32, 32)),
    "vit-layer-scale": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10, init_values=0.1),
        (3, 32, 32),
    ),
}
# The project's promise. Float32 rounding gives about 1e-6 on these networks.
TOLERANCE = 1e-5


def batch(shape, size=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, *shape, generator=generator), torch.randint(10, (size,), generator=generator)


@pytest.fixture
def smooth(monkeypatch):
    """Softplus for ReLU: a float32 activation that rounds across ReLU's kink changes the gradient by about 1e-4."""
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: F.softplus(x))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("smooth")
def test_clipped_sum_equals_the_loop_over_single_examples(name, plan):
    check_against_the_loop(name, plan, torch.float32)


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-automatic"])
@pytest.mark.parametrize("name", MODELS)
def test_float64_models_with_relu_equal_the_loop(name, plan):
    check_against_the_loop(name, plan, torch.float64)


def check_against_the_loop(name, plan, dtype):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, (x, y) = make().to(dtype), batch(shape)
    x = x.to(dtype)
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PLANS[plan])
    expected, expected_norms = clipped_sum_by_loop(model, x, y, PLANS[plan])
    assert set(sums) == set(expected)
    assert all(value.dtype == torch.float32 for value in sums.values())
    assert relative_error(sums, expected) < TOLERANCE
    # A layer whose gradient cancels (a bias before a normalisation) has only rounding left: hence the absolute part.
    torch.testing.assert_close(
        norms.double(), expected_norms.view_as(norms), rtol=TOLERANCE, atol=TOLERANCE * float(expected_norms.max())
    )


@pytest.mark.parametrize("augmult", [4, 16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("smooth")
def test_the_mean_over_views_is_clipped_once(name, augmult):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, (x, y) = make(), batch(shape, size=2 * augmult)
    for plan in (PLANS["flat-abadi"], PLANS["per-layer-automatic"])[: 1 if augmult == 16 else 2]:
        sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan, augmult=augmult)
        expected, expected_norms = clipped_sum_by_loop(model, x, y, plan, augmult=augmult)
        assert relative_error(sums, expected) < TOLERANCE
        torch.testing.assert_close(
            norms.double(), expected_norms.view_as(norms), rtol=TOLERANCE, atol=TOLERANCE * float(expected_norms.max())
        )


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-automatic"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_physical_batches_do_not_change_the_sum(plan, size):
    torch.manual_seed(0)
    model, (x, y) = WideResNet(10, 1, 10), batch((3, 16, 16), size=8)
    whole, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PLANS[plan])
    pieces, piece_norms = clipped_gradient_sum(
        model, F.cross_entropy, x, y, clip_plan=PLANS[plan], max_physical_batch_size=size
    )
    # The order of the additions differs, and nothing else.
    assert relative_error(pieces, {name: value.double() for name, value in whole.items()}) < 1e-6
    torch.testing.assert_close(piece_norms, norms, rtol=1e-6, atol=1e-6)


LAYERS = {
    "conv-stride-padding": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 9, 9)),
    "conv-wide-factored": (lambda: nn.Conv2d(16, 32, 3, padding=1), (16, 4, 5)),
    "conv-wide-factored-strided": (lambda: nn.Conv2d(16, 32, 3, padding=1, stride=2), (16, 8, 7)),
    "conv-wide-factored-dilated": (lambda: nn.Conv2d(16, 32, 3, padding=2, dilation=2), (16, 5, 5)),
    "conv-same-even-kernel": (lambda: nn.Conv2d(4, 6, (2, 4), padding="same"), (4, 6, 6)),
    "conv-reflect": (lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"), (16, 5, 5)),
    "conv-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 7, 7)),
    "conv-depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 7, 7)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 11)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), (2, 5, 5, 5)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1), (4, 5, 5)),
    "transposed2d-dilated": (lambda: nn.ConvTranspose2d(4, 3, 2, dilation=2, bias=False), (4, 5, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 3, 2, 3)),
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear-tokens": (lambda: nn.Linear(7, 5), (2, 3, 7)),
    "linear-without-bias": (lambda: nn.Linear(7, 5, bias=False), (7,)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 5)),
    "layer-norm": (lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),
    "layer-norm-no-tokens": (lambda: nn.LayerNorm(8), (8,)),
    "instance-norm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 7)),
    "instance-norm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 5)),
    "instance-norm3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 4, 3)),
    "rms-norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "rms-norm-two-dimensions": (lambda: nn.RMSNorm((3, 4), eps=1e-3), (2, 3, 4)),
    "timm-layer-norm": (lambda: timm.layers.LayerNorm(8), (3, 8)),
    "timm-layer-norm-2d": (lambda: timm.layers.LayerNorm2d(6), (6, 4, 3)),
    "timm-group-norm": (lambda: timm.layers.GroupNorm(6, 2), (6, 4, 3)),
    "timm-group-norm-1": (lambda: timm.layers.GroupNorm1(6), (6, 4, 3)),
    "timm-rms-norm": (lambda: timm.layers.RmsNorm(8), (3, 8)),
    "layer-scale": (lambda: timm.layers.LayerScale(8, init_values=0.3), (3, 8)),
    "layer-scale-2d": (lambda: timm.layers.LayerScale2d(4, init_values=0.3), (4, 3, 5)),
    "standardized-conv": (lambda: timm.layers.StdConv2d(4, 6, 3, stride=2, bias=True), (4, 7, 7)),
    "scaled-standardized-conv": (lambda: timm.layers.ScaledStdConv2d(4, 6, 3, gamma=1.7, gain_init=0.8), (4, 5, 5)),
    "scaled-standardized-conv-groups": (lambda: timm.layers.ScaledStdConv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "scaled-standardized-conv-wide": (lambda: timm.layers.ScaledStdConv2d(32, 48, 3), (32, 2, 2)),
    "timm-attention": (lambda: timm.layers.Attention(8, num_heads=2, qkv_bias=True), (5, 8)),
    "timm-attention-pool": (lambda: timm.layers.AttentionPoolLatent(8, num_heads=2), (5, 8)),
    "prelu-by-fallback": (lambda: nn.PReLU(4), (4, 5)),
    "embedding-of-attention-by-fallback": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (3, 8),
    ),
}


@pytest.mark.parametrize("plan", ["flat-tight", "flat-loose", "per-layer-abadi"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_kind_equals_the_loop(name, channels_last, plan):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    plan = {"flat-tight": ClipPlan.flat(max_grad_norm=0.1), "flat-loose": ClipPlan.flat(max_grad_norm=1e3)}.get(
        plan, PLANS["per-layer-abadi"]
    )
    if channels_last and len(shape) < 3:
        pytest.skip("channels-last needs two spatial dimensions")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, *shape, generator=generator)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    layer = make()
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    y = torch.randn(model(x).shape, generator=generator)

    def loss(output, target):
        return (output - target).square().sum(1).mean()

    for augmult in (1, 3):
        sums, _ = clipped_gradient_sum(model, loss, x, y, clip_plan=plan, augmult=augmult)
        expected, _ = clipped_sum_by_loop(model, x, y.double(), plan, loss, augmult=augmult)
        assert relative_error(sums, expected) < TOLERANCE


class _Twice(nn.Module):
    """One linear layer called twice, and its weight shared with another module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


def test_several_uses_of_a_parameter_add_up_before_the_norm():
    torch.manual_seed(0)
    model, x = _Twice(), torch.randn(5, 6)
    y = torch.randint(6, (5,))
    plan = ClipPlan.flat(max_grad_norm=0.3)
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, expected_norms = clipped_sum_by_loop(model, x, y, plan)
    assert relative_error(sums, expected) < TOLERANCE
    torch.testing.assert_close(norms.double(), expected_norms[:, 0], rtol=1e-5, atol=0)


def test_sum_and_unreduced_losses_give_the_same_sum():
    torch.manual_seed(0)
    model, (x, y) = SmallCNN(10, in_channels=1, image_size=8), batch((1, 8, 8), size=6)
    mean, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=ClipPlan.flat())
    single, _ = clipped_gradient_sum(
        model, nn.CrossEntropyLoss(reduction="none"), x, y, clip_plan=ClipPlan.flat(), max_physical_batch_size=4
    )
    assert relative_error(single, {name: value.double() for name, value in mean.items()}) < 1e-6


def test_frozen_parameters_stay_out_and_the_model_is_left_as_it_was():
    model, (x, y) = SmallCNN(10, in_channels=1, image_size=8), batch((1, 8, 8))
    frozen = next(iter(dict(model.named_parameters())))
    model.get_parameter(frozen).requires_grad_(False)
    plan = ClipPlan.flat()
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, _ = clipped_sum_by_loop(model, x, y, plan)
    assert frozen not in sums
    assert relative_error(sums, expected) < TOLERANCE
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad == (name != frozen) for name, p in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_examples_sum_to_zero():
    model = nn.Linear(3, 2)
    sums, norms = clipped_gradient_sum(
        model, F.cross_entropy, torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), clip_plan=ClipPlan.flat()
    )
    assert norms.shape == (0,)
    assert all(not value.any() for value in sums.values())


def test_bfloat16_autocast_keeps_norms_and_sums_in_float32():
    torch.manual_seed(0)
    model, (x, y) = WideResNet(10, 2, 10), batch((3, 16, 16), size=6)
    plan = ClipPlan.flat(max_grad_norm=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, expected_norms = clipped_sum_by_loop(model, x, y, plan)
    assert norms.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in sums.values())
    # bfloat16 keeps 8 bits: activations and gradients are off by a few percent.
    assert relative_error(sums, expected) < 0.1
    torch.testing.assert_close(norms.double(), expected_norms[:, 0], rtol=0.05, atol=0)


@pytest.mark.parametrize("factor", ["abadi", "automatic"])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_example_contributes_more_than_the_bound(factor, autocast):
    torch.manual_seed(0)
    model, (x, y) = WideResNet(10, 2, 10), batch((3, 16, 16), size=5)
    plan = ClipPlan.flat(max_grad_norm=0.01, factor=factor)
    for i in range(5):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sums, _ = clipped_gradient_sum(model, F.cross_entropy, x[i : i + 1], y[i : i + 1], clip_plan=plan)
        norm = float(torch.cat([value.flatten().double() for value in sums.values()]).norm())
        # Every example is clipped here (its norm is far above 0.01), so the bound is met and not exceeded, up to the
        # rounding of float32.
        assert norm <= 0.01 * (1 + 2e-6)
        assert norm > 0.009


def test_rows_that_are_not_examples_are_refused_with_the_modules_name():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x.reshape(-1, 3)).reshape(len(x), -1)

    with pytest.raises(ModelError, match="inner"):
        clipped_gradient_sum(
            Folded(), F.cross_entropy, torch.randn(4, 6), torch.zeros(4, dtype=torch.long), clip_plan=ClipPlan.flat()
        )


def test_a_recurrent_layer_trains_by_fallback():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    model, x, y = Recurrent(), torch.randn(4, 6, 4), torch.randint(3, (4,))
    plan = ClipPlan.per_layer()
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, _ = clipped_sum_by_loop(model, x, y, plan)
    assert relative_error(sums, expected) < TOLERANCE


def test_an_input_changed_in_place_after_use_is_refused_by_name():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            x = x * 1.0
            y = self.inner(x)
            x.mul_(2.0)
            return y

    with pytest.raises(ModelError, match=r"inner.*in place"):
        clipped_gradient_sum(
            Changes(), F.cross_entropy, torch.randn(4, 3), torch.zeros(4, dtype=torch.long), clip_plan=ClipPlan.flat()
        )


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * self.scale.exp()


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_is_a_single_number_has_gradients(plan):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(5, 4), Temperature()), torch.randn(6, 5), torch.randint(4, (6,))
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PLANS[plan])
    expected, _ = clipped_sum_by_loop(model, x, y, PLANS[plan])
    assert sums["1.scale"].shape == ()
    assert relative_error(sums, expected) < TOLERANCE
    # No example at all.
    empty, _ = clipped_gradient_sum(model, F.cross_entropy, x[:0], y[:0], clip_plan=PLANS[plan])
    assert float(empty["1.scale"]) == 0
