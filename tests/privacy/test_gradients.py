"""Layers and whole models: the clipped sum equals a float64 loop over single examples."""

from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from reference import clipped_gradient_sum, clipped_sum_by_loop, relative_error
from torch import nn
from torch.nn import functional as F
from torchvision.models import convnext_tiny

from dp_lightning.models import ResNet, SmallCNN, WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.gradients import products
from dp_lightning.privacy.gradients.clipped_sum import _ROOM, ClippedSum

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


@pytest.mark.parametrize("plan", ["flat-automatic", "per-layer-abadi"])
@pytest.mark.parametrize("name", ["wrn", "resnet18-cifar", "vit"])
def test_float64_models_with_relu_equal_the_loop(name, plan):
    check_against_the_loop(*MODELS[name], PLANS[plan], torch.float64)


def check_against_the_loop(make, shape, plan, dtype, size=4):
    torch.manual_seed(0)
    model, (x, y) = make().to(dtype), batch(shape, size)
    x = x.to(dtype)
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, expected_norms = clipped_sum_by_loop(model, x, y, plan)
    assert set(sums) == set(expected)
    assert all(value.dtype == torch.float32 for value in sums.values())
    assert relative_error(sums, expected) < TOLERANCE
    # A layer whose gradient cancels (a bias before a normalisation) has only rounding left: hence the absolute part.
    torch.testing.assert_close(
        norms.double(), expected_norms.view_as(norms), rtol=TOLERANCE, atol=TOLERANCE * float(expected_norms.max())
    )


@pytest.mark.parametrize("augmult", [4, 16])
@pytest.mark.parametrize("name", ["wrn-de-et-al", "small-cnn", "vit"])
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
    "conv-wide": (lambda: nn.Conv2d(16, 32, 3, padding=1), (16, 4, 5)),
    "conv-wide-strided": (lambda: nn.Conv2d(16, 32, 3, padding=1, stride=2), (16, 8, 7)),
    "conv-reflect": (lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"), (16, 5, 5)),
    "linear-tokens": (lambda: nn.Linear(7, 5), (2, 3, 7)),
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
    "prelu": (lambda: nn.PReLU(4), (4, 5)),
    "transformer-layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (3, 8),
    ),
}


@pytest.mark.parametrize("plan", ["flat-tight", "per-layer-abadi"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_kind_equals_the_loop(name, channels_last, plan):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    plan = ClipPlan.flat(max_grad_norm=0.1) if plan == "flat-tight" else PLANS[plan]
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


def test_a_logical_batch_without_examples_sums_to_zero():
    parameters = dict(nn.Linear(3, 2).named_parameters())
    total = ClippedSum(parameters, ClipPlan.flat())
    total.reset()
    total.begin(0)
    assert total.end().shape == (0, 1)
    assert not any(value.any() for value in total.sums.values())


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


def test_rows_that_are_no_examples_add_up_in_their_example():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner(x.reshape(-1, 3)).reshape(len(x), -1)

    model, (x, y), plan = Folded(), batch((6,)), ClipPlan.flat(max_grad_norm=0.1)
    y %= 4
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    assert relative_error(sums, clipped_sum_by_loop(model, x, y, plan)[0]) < TOLERANCE


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * self.scale.exp()


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_is_a_single_number_has_gradients(plan):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(5, 4), Temperature()), torch.randn(6, 5), torch.randint(4, (6,))
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PLANS[plan])
    expected, _ = clipped_sum_by_loop(model, x, y, PLANS[plan])
    assert sums["1.scale"].shape == ()
    assert relative_error(sums, expected) < TOLERANCE


# Whole models


def mobilenet():
    norm = partial(timm.layers.GroupNormAct, group_size=8)
    return timm.create_model("mobilenetv2_035", norm_layer=norm, num_classes=10)


def small_bit():
    """The network of Kolesnikov et al. 2020 in small: standardised convolutions and GroupNorm with its activation."""
    return timm.models.resnetv2.ResNetV2(
        layers=(1, 1, 1, 1), channels=(128, 128, 128, 128), num_classes=10, conv_layer=timm.layers.StdConv2d
    )


class TwoConvNeXtBlocks(nn.Module):
    """torchvision's ConvNeXt without its stochastic depth."""

    def __init__(self):
        super().__init__()
        full = convnext_tiny(stochastic_depth_prob=0.0)
        self.stem, self.blocks = full.features[0], full.features[1][:2]
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


LARGER = {
    "nf-resnet50": (lambda: timm.create_model("nf_resnet50", num_classes=10), (3, 32, 32)),
    "vit-s": (lambda: timm.create_model("vit_small_patch16_224", img_size=48, depth=2, num_classes=10), (3, 48, 48)),
    "convnext": (lambda: timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.0), (3, 32, 32)),
    "convnext-torchvision": (TwoConvNeXtBlocks, (3, 16, 16)),
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


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-abadi"])
@pytest.mark.parametrize("name", LARGER)
def test_the_clipped_sum_of_a_larger_model_equals_the_loop(name, plan):
    # float64: a float32 activation that rounds across a kink moves the gradient by 1e-4.
    check_against_the_loop(*LARGER[name], PLANS[plan], torch.float64, size=2)


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-abadi"])
def test_embeddings_add_up_repeated_indices_and_skip_padding(plan):
    plan = PLANS[plan]

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 3, padding_idx=2)
            self.head = nn.Linear(3, 10)

        def forward(self, indices):
            return self.head(torch.tanh(self.embedding(indices)).mean((1, 2)))

    model = Words().double()
    x = torch.tensor([[[1, 1], [2, 3]], [[2, 2], [2, 2]], [[6, 5], [4, 6]]])
    y = torch.tensor([0, 3, 9])
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    # The bound is kept with some room for rounding.
    expected, expected_norms = loop(model, x, y, replace(plan, max_grad_norm=plan.max_grad_norm * (1 - _ROOM)))
    assert relative_error(sums, expected) < 1e-6
    torch.testing.assert_close(norms.double(), expected_norms.view_as(norms), rtol=1e-5, atol=1e-7)


def loop(model, x, y, plan):
    """The reference turns its inputs into float64, which indices are not."""

    class FromFloat(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, values):
            return self.model(values.long())

    sums, norms = clipped_sum_by_loop(FromFloat(), x.double(), y, plan)
    return {name.removeprefix("model."): value for name, value in sums.items()}, norms


BOTH_KNOW = {
    "linear": (lambda: nn.Linear(6, 5), (6,)),
    "linear-tokens": (lambda: nn.Linear(6, 5), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, dilation=2), (4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 5, 3)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 5)),
    "instance-norm": (lambda: nn.InstanceNorm2d(6, affine=True), (6, 5, 5)),
    "layer-norm": (lambda: nn.LayerNorm((5, 4)), (3, 5, 4)),
    "rms-norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "wide-resnet": (lambda: WideResNet(10, 1, 10), (3, 16, 16)),
    "small-cnn": (lambda: SmallCNN(10, in_channels=1), (1, 8, 8)),
}


@pytest.mark.parametrize("name", BOTH_KNOW)
def test_per_example_norms_equal_those_of_opacus(name):
    from opacus.grad_sample import GradSampleModule

    torch.manual_seed(0)
    make, shape = BOTH_KNOW[name]
    model = nn.Sequential(make(), nn.Tanh(), nn.Flatten())
    x = torch.randn(4, *shape)
    y = torch.randint(model(x).shape[1], (4,))
    _, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PLANS["per-layer-abadi"])
    wrapped = GradSampleModule(model)
    F.cross_entropy(wrapped(x), y).backward()
    samples = {key: p.grad_sample for key, p in model.named_parameters()}
    groups = PLANS["per-layer-abadi"].groups(samples)
    theirs = torch.stack(
        [torch.sqrt(sum(samples[key].flatten(1).square().sum(1) for key in keys)) for keys in groups.values()], dim=1
    )
    # Both are float32; the smallest norms of a network are 1e-3 of its largest.
    torch.testing.assert_close(norms, theirs, rtol=1e-4, atol=1e-5 * float(theirs.max()))


# Tensors that belong to no example, and numbers that are not finite


def squares(output, target):
    return output.square().flatten(1).sum(1).mean()


def check(model, x, plan):
    sums, norms = clipped_gradient_sum(model, squares, x, torch.zeros(len(x)), clip_plan=plan)
    expected, expected_norms = clipped_sum_by_loop(model, x, torch.zeros(len(x)), plan, squares)
    assert relative_error(sums, expected) < 1e-5
    expected_norms = expected_norms[:, 0] if plan.kind == "flat" else expected_norms
    torch.testing.assert_close(norms.double(), expected_norms, rtol=1e-5, atol=0)


def repadded(before, after):
    conv = nn.Conv2d(2, 3, 3, padding=before)
    conv.padding = after
    return conv


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-abadi"])
@pytest.mark.parametrize("paddings", [(0, (1, 2)), (1, (0, 0))])
def test_a_convolution_whose_padding_was_changed_pads_as_it_says(paddings, plan):
    check(repadded(*paddings), torch.randn(5, 2, 6, 6), PLANS[plan])


@pytest.mark.parametrize("plan", ["flat-abadi", "per-layer-abadi"])
def test_attention_of_which_a_part_is_trained_equals_the_loop(plan):
    check(Attention(), torch.randn(5, 4, 6), PLANS[plan])


class Attention(nn.Module):
    """Trains what the attention of torch uses without calling it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inner.in_proj_weight.requires_grad_(False)
        self.inner.in_proj_bias.requires_grad_(False)

    def forward(self, x):
        return self.inner(x, x, x)[0]


def test_labels_without_a_second_dimension_are_embedded():
    embedding, labels = nn.Embedding(7, 4), torch.tensor([3, 0, 3, 6])
    sums, norms = clipped_gradient_sum(
        embedding, squares, labels, torch.zeros(4), clip_plan=ClipPlan.flat(max_grad_norm=1e9)
    )
    squares(embedding(labels), None).mul(4).backward()
    torch.testing.assert_close(sums["weight"], embedding.weight.grad)
    torch.testing.assert_close(norms, 2 * embedding(labels).norm(dim=1))


def test_the_sums_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))
        for plan in (PLANS["flat-abadi"], PLANS["per-layer-abadi"]):
            check(model, torch.randn(4, 2, 6), plan)
    finally:
        torch.set_default_dtype(torch.float32)


class Scaled(nn.Module):
    """Without a rule, and called with a tensor that does not belong to the examples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, scale):
        return F.linear(x * scale, self.weight)


class WithScale(nn.Module):
    def __init__(self, *, scale_first=False):
        super().__init__()
        self.inner, self.scale_first = Scaled(), scale_first
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x):
        return self.inner(self.scale, x) if self.scale_first else self.inner(x, self.scale)


class WithTable(nn.Module):
    def __init__(self, inner, rows):
        super().__init__()
        self.inner = inner
        self.register_buffer("table", torch.randn(rows, 8))

    def forward(self, x):
        return self.inner(x, self.table)


class Looks(nn.Module):
    """Takes from all rows of a table, and can from one, but for the deviation of one row."""

    def __init__(self, *, standardize=False):
        super().__init__()
        self.weight, self.standardize = nn.Parameter(0.1 * torch.randn(8, 8)), standardize

    def forward(self, x, table):
        if self.standardize:
            table = (table - table.mean(0)) / table.std(0)
        return (x @ self.weight @ table.T).softmax(-1) @ table


class Masked(nn.Module):
    def __init__(self, length, project):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.project = nn.Linear(6, 6) if project else nn.Identity()
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())

    def forward(self, x):
        return self.inner(x, self.project(x), x, attn_mask=self.mask, need_weights=False)[0]


@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_tensor_for_all_examples_is_passed_whole(size):
    check(WithScale(), torch.randn(size, 8), PLANS["flat-abadi"])


@pytest.mark.parametrize("size", [5, 6, 8])
def test_a_table_that_is_not_finite_leaves_no_example_finite(size):
    model = WithTable(Looks(), 8)
    model.table[1:] = torch.nan
    loss = lambda output, target: squares(output.nan_to_num(), target)  # noqa: E731
    sums, norms = clipped_gradient_sum(
        model, loss, torch.randn(size, 8), torch.zeros(size), clip_plan=PLANS["flat-abadi"]
    )
    assert norms.isnan().all()
    assert not any(gradient.any() for gradient in sums.values())


@pytest.mark.parametrize("size", [5, 6])
def test_a_table_belongs_to_no_example_whatever_its_length(size):
    check(WithTable(Looks(standardize=True), 6), torch.randn(size, 8), PLANS["flat-abadi"])


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("size", [3, 4])
def test_a_mask_belongs_to_no_example_whatever_its_length(size, project):
    check(Masked(4, project), torch.randn(size, 4, 6), PLANS["flat-abadi"])


@pytest.mark.parametrize("size", [3, 4])
def test_a_rotary_table_belongs_to_no_example_whatever_its_length(size):
    model = timm.create_model("vit_small_patch16_rope_224", img_size=32, depth=1, embed_dim=48, num_classes=6)
    check(model, torch.randn(size, 3, 32, 32), PLANS["flat-abadi"])  # four patches


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("size", "finite"), [(1, 0), (5, 4), (8, 0), (8, 1), (8, 7)])
def test_examples_that_are_not_finite_contribute_nothing_and_change_nothing_of_the_others(size, finite, zeros):
    plan, model, x, y = PLANS["flat-abadi"], WithScale(), torch.randn(size, 8), torch.zeros(size)
    model.scale += 1
    if zeros:
        nn.init.zeros_(model.inner.weight)
    x[finite:] = torch.nan
    loss = lambda output, target: (output * torch.arange(8)).sum(1).mean()  # noqa: E731
    sums, norms = clipped_gradient_sum(model, loss, x, y, clip_plan=plan)
    assert norms.isnan().tolist() == [False] * finite + [True] * (size - finite)
    if finite:
        others, _ = clipped_sum_by_loop(model, x[:finite], y[:finite], plan, loss)
        assert relative_error(sums, others) < 1e-5
    else:
        assert not sums["inner.weight"].any()


def test_a_gradient_that_is_zero_but_for_rounding_is_right():
    """A bias of the keys moves all scores of a query alike, so that its gradient is the rounding of others."""
    model = timm.create_model("cait_xxs24_224", img_size=64, depth=1, embed_dim=48, num_heads=4, num_classes=5)
    x, y = torch.randn(3, 3, 64, 64), torch.arange(3)
    found, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=ClipPlan.flat(max_grad_norm=1e6))
    expected = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    for name, gradient in zip(dict(model.named_parameters()), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
