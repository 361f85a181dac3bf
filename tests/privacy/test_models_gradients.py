"""Whole models: the clipped sum equals the loop, and equals Opacus' hooks on what both know."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from reference import clipped_sum_by_loop, relative_error
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models import convnext_tiny

from dp_lightning.errors import ModelError
from dp_lightning.models import SmallCNN, WideResNet
from dp_lightning.privacy import ClipPlan, clipped_gradient_sum
from dp_lightning.privacy.gradients.clipped_sum import _ROOM

FLAT, PER_LAYER = ClipPlan.flat(max_grad_norm=0.5), ClipPlan.per_layer(max_grad_norm=0.5)


def mobilenet():
    norm = partial(timm.layers.GroupNormAct, group_size=8)
    return timm.create_model("mobilenetv2_035", norm_layer=norm, num_classes=10)


def small_bit():
    """The network of Kolesnikov et al. 2020 in small: standardised convolutions and GroupNorm with its activation."""
    return timm.models.resnetv2.ResNetV2(
        layers=(1, 1, 1, 1), channels=(128, 128, 128, 128), num_classes=10, conv_layer=timm.layers.StdConv2d
    )


class Tied(nn.Module):
    """A language model in small: the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices):
        return self.head(torch.tanh(self.inner(self.embedding(indices)))).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5, batch_first=True, num_layers=2)
        self.head = nn.Linear(5, 10)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class TwoConvNeXtBlocks(nn.Module):
    """torchvision's ConvNeXt without its stochastic depth."""

    def __init__(self):
        super().__init__()
        full = convnext_tiny(stochastic_depth_prob=0.0)
        self.stem, self.blocks = full.features[0], full.features[1][:2]
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


MODELS = {
    "nf-resnet50": (lambda: timm.create_model("nf_resnet50", num_classes=10), (3, 64, 64)),
    "vit-s": (lambda: timm.create_model("vit_small_patch16_224", img_size=48, depth=4, num_classes=10), (3, 48, 48)),
    "vit-layer-scale": (
        lambda: timm.create_model("deit3_small_patch16_224", img_size=32, depth=2, num_classes=10),
        (3, 32, 32),
    ),
    "convnext": (lambda: timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.0), (3, 64, 64)),
    "convnext-torchvision": (TwoConvNeXtBlocks, (3, 16, 16)),
    "mobilenet-group-norm": (mobilenet, (3, 32, 32)),
    "resnetv2-bit": (small_bit, (3, 64, 64)),
    "recurrent": (Recurrent, (6, 4)),
    "tied": (Tied, None),
}


def batch(shape, size=3):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (size,), generator=generator)
    if shape is None:
        return torch.randint(10, (size, 5), generator=generator), labels
    return torch.randn(size, *shape, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("plan", [FLAT, PER_LAYER], ids=["flat", "per-layer"])
@pytest.mark.parametrize("name", MODELS)
def test_the_clipped_sum_of_a_model_equals_the_loop(name, plan):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    # float64: a float32 activation that rounds across a kink moves the gradient by 1e-4.
    model, (x, y) = make().double(), batch(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fallback, which a test below asks for
        sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    expected, _ = loop(model, x, y, plan)
    assert set(sums) == set(expected)
    assert relative_error(sums, expected) < 1e-5


def loop(model, x, y, plan):
    """The reference turns its inputs into float64, which indices are not."""
    if x.is_floating_point():
        return clipped_sum_by_loop(model, x, y, plan)

    class FromFloat(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, values):
            return self.model(values.long())

    sums, norms = clipped_sum_by_loop(FromFloat(), x.double(), y, plan)
    return {name.removeprefix("model."): value for name, value in sums.items()}, norms


@pytest.mark.parametrize("plan", [FLAT, PER_LAYER], ids=["flat", "per-layer"])
def test_embeddings_add_up_repeated_indices_and_skip_padding(plan):
    torch.manual_seed(0)

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


@pytest.mark.parametrize("keywords", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_embeddings_that_look_at_the_batch_are_refused(keywords):
    model = nn.Sequential(nn.Embedding(5, 10, **keywords), nn.Flatten())
    with pytest.raises(ModelError, match="scale_grad_by_freq"):
        clipped_gradient_sum(
            model, F.cross_entropy, torch.tensor([[1], [1]]), torch.tensor([0, 1]), clip_plan=ClipPlan.flat()
        )


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
    _, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=PER_LAYER)
    wrapped = GradSampleModule(model)
    F.cross_entropy(wrapped(x), y).backward()
    samples = {key: p.grad_sample for key, p in model.named_parameters()}
    groups = PER_LAYER.groups(samples)
    theirs = torch.stack(
        [torch.sqrt(sum(samples[key].flatten(1).square().sum(1) for key in keys)) for keys in groups.values()], dim=1
    )
    # Both are float32; the smallest norms of a network are 1e-3 of its largest.
    torch.testing.assert_close(norms, theirs, rtol=1e-4, atol=1e-5 * float(theirs.max()))


class Checkpointed(nn.Module):
    """Segments of a network that run again in the backward pass."""

    def __init__(self, *, use_reentrant=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.segments = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 10)
        self.use_reentrant = use_reentrant
        self.active = True

    def forward(self, x):
        x = self.stem(x)
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant) if self.active else segment(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("plan", [FLAT, PER_LAYER], ids=["flat", "per-layer"])
def test_activation_checkpointing_changes_nothing(plan):
    torch.manual_seed(0)
    model, x, y = Checkpointed(), torch.randn(4, 3, 9, 9), torch.randint(10, (4,))
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    model.active = False
    expected, expected_norms = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=plan)
    assert all(torch.equal(sums[name], expected[name]) for name in expected)
    assert torch.equal(norms, expected_norms)


def test_checkpointed_timm_models_train():
    torch.manual_seed(0)
    model, (x, y) = MODELS["vit-s"][0]().double(), batch((3, 48, 48))
    expected, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=FLAT)
    model.set_grad_checkpointing(True)
    sums, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=FLAT)
    assert relative_error(sums, {name: value.double() for name, value in expected.items()}) < 1e-9


def test_checkpointed_segments_keep_nothing_of_the_forward_pass():
    """What a layer inside a segment has seen is not alive between the forward and the backward pass."""
    import gc
    import weakref

    model, x, y = Checkpointed(), torch.randn(4, 3, 9, 9), torch.randint(10, (4,))
    model.segments[0][3] = nn.Tanh()
    model.segments[1][3] = nn.Tanh()
    seen = []
    model.segments[0][2].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(args[0])))

    def loss_of(output, target):
        gc.collect()
        assert seen[0]() is None
        return F.cross_entropy(output, target)

    clipped_gradient_sum(model, loss_of, x, y, clip_plan=FLAT)
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:No gradient rule")
def test_reentrant_checkpointing_is_refused_with_the_fix():
    model, x, y = Checkpointed(use_reentrant=True), torch.randn(4, 3, 9, 9), torch.randint(10, (4,))
    with pytest.raises(ModelError, match="use_reentrant=False"):
        clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=FLAT)


def test_the_fallback_is_named_in_one_warning():
    with pytest.warns(UserWarning, match=r"'0' \(PReLU\), '2' \(PReLU\)") as caught:
        clipped_gradient_sum(
            nn.Sequential(nn.PReLU(4), nn.Linear(4, 10), nn.PReLU(10)),
            F.cross_entropy,
            torch.randn(3, 4),
            torch.tensor([1, 2, 3]),
            clip_plan=FLAT,
        )
    assert len([w for w in caught if "No gradient rule" in str(w.message)]) == 1


def test_the_way_of_every_module_can_be_printed(capsys):
    model = WideResNet(10, 1, 10)
    clipped_gradient_sum(
        model, F.cross_entropy, torch.randn(2, 3, 8, 8), torch.tensor([1, 2]), clip_plan=FLAT, explain=True
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(1 for module in model.modules() if module._parameters)
    assert any(line.startswith("stem ") and "Conv2d" in line and line.endswith("formed") for line in lines)
    assert any(line.startswith("classifier ") and line.endswith("Gram") for line in lines)
