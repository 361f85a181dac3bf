"""Layers and whole models: the clipped sum equals a float64 loop over single examples."""

from functools import partial

import pytest
import timm
import torch
from clipped_sums import clipped_gradient_sum
from reference import clipped_sum_by_loop, relative_error
from torch import nn
from torch.nn import functional as F

from dp_lightning.models import ResNet, SmallCNN, WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.gradients import products

PLANS = {
    "flat-abadi": ClipPlan.flat(max_grad_norm=1.0),
    "per-layer-abadi": ClipPlan.per_layer(max_grad_norm=1.0),
    "per-layer-automatic": ClipPlan.per_layer(max_grad_norm=2.0, factor="automatic"),
}
MODELS = {
    "wrn": (lambda: WideResNet(16, 4, 10), (3, 16, 16)),
    "wrn-de-et-al": (lambda: WideResNet(10, 2, 10, weight_standardization=True, relu_first=True), (3, 16, 16)),
    "small-cnn": (lambda: SmallCNN(10, in_channels=1, image_size=8), (1, 8, 8)),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10), (3, 32, 32)),
}
# Float32 rounding gives 1e-6 to 5e-6 on these networks.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _without_the_bound_of_rounding(monkeypatch):
    """Norms as they are: the bound of the sum's rounding, which some methods add, has its tests in test_products.

    Which methods are used depends on the kind of processor, and the bound is up to 1e-4 here.
    """
    monkeypatch.setattr(products, "rounding_per_term", lambda positions: 0.0)


def batch(shape, size=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, *shape, generator=generator), torch.randint(10, (size,), generator=generator)


@pytest.fixture
def smooth(monkeypatch):
    """Softplus for ReLU: a float32 activation that rounds across ReLU's kink changes the gradient by about 1e-4."""
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: F.softplus(x))


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-automatic"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("smooth")
def test_clipped_sum_equals_the_loop_over_single_examples(name, plan):
    check_against_the_loop(*MODELS[name], PLANS[plan], torch.float32)


def check_against_the_loop(make, shape, plan, dtype, size=3, augmult=1):
    torch.manual_seed(0)
    model, (x, y) = make().to(dtype), batch(shape, size)
    x = x.to(dtype)
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan, augmult=augmult)
    expected, expected_norms = clipped_sum_by_loop(model, x, y, plan, augmult=augmult)
    assert set(sums) == set(expected)
    assert all(value.dtype == torch.float32 for value in sums.values())
    assert relative_error(sums, expected) < TOLERANCE
    # A layer whose gradient cancels (a bias before a normalisation) has only rounding left: hence the absolute part.
    torch.testing.assert_close(
        norms.double(), expected_norms.view_as(norms), rtol=TOLERANCE, atol=TOLERANCE * float(expected_norms.max())
    )


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-automatic"])
@pytest.mark.parametrize("name", ["wrn-de-et-al", "vit"])
@pytest.mark.usefixtures("smooth")
def test_the_mean_over_views_is_clipped_once(name, plan):
    check_against_the_loop(*MODELS[name], PLANS[plan], torch.float32, size=6, augmult=3)


LAYERS = {
    "timm-layer-norm-2d": (lambda: timm.layers.LayerNorm2d(6), (6, 4, 3)),
    "timm-group-norm-1": (lambda: timm.layers.GroupNorm1(6), (6, 4, 3)),
    "layer-scale-2d": (lambda: timm.layers.LayerScale2d(4, init_values=0.3), (4, 3, 5)),
    "standardized-conv": (lambda: timm.layers.StdConv2d(4, 6, 3, stride=2, bias=True), (4, 7, 7)),
    "scaled-standardized-conv": (lambda: timm.layers.ScaledStdConv2d(4, 6, 3, gamma=1.7, gain_init=0.8), (4, 5, 5)),
    "timm-attention-pool": (lambda: timm.layers.AttentionPoolLatent(8, num_heads=2), (5, 8)),
    "prelu": (lambda: nn.PReLU(4), (4, 5)),
    "layers of one size": (lambda: nn.Sequential(*(nn.Linear(8, 8, bias=i != 2) for i in range(4))), (8,)),
    "layers of one size, tokens": (lambda: nn.Sequential(*(nn.Linear(8, 8, bias=i != 2) for i in range(4))), (3, 8)),
    "transformer-layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 8)),
}


@pytest.mark.parametrize("plan", [ClipPlan.flat(max_grad_norm=0.1), PLANS["per-layer-abadi"]])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_kind_equals_the_loop(name, channels_last, plan):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, *shape, generator=generator)
    if channels_last and x.dim() > 3:
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


# Whole models


def mobilenet():
    norm = partial(timm.layers.GroupNormAct, group_size=8)
    return timm.create_model("mobilenetv2_035", norm_layer=norm, num_classes=10)


def small_bit():
    """The network of Kolesnikov et al. 2020 in small: standardised convolutions and GroupNorm with its activation."""
    return timm.models.resnetv2.ResNetV2(
        layers=(1, 1, 1, 1), channels=(128, 128, 128, 128), num_classes=10, conv_layer=timm.layers.StdConv2d
    )


LARGER = {
    "resnet18-cifar": (lambda: ResNet(18, 10, stem="cifar"), (3, 8, 8)),
    "convnext": (lambda: timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.0), (3, 32, 32)),
    "mobilenet-group-norm": (mobilenet, (3, 32, 32)),
    "resnetv2-bit": (small_bit, (3, 64, 64)),
    "swin": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=56, depths=(2, 1), embed_dim=24, num_heads=(2, 4), num_classes=10,
            drop_path_rate=0.0,
        ),
        (3, 56, 56),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGER)
def test_the_clipped_sum_of_a_larger_model_equals_the_loop(name):
    # float64: a float32 activation that rounds across a kink moves the gradient by 1e-4.
    check_against_the_loop(*LARGER[name], PLANS["per-layer-abadi"], torch.float64, size=2)
