"""Products behind the gradients of convolutions and linear layers: their rounding, precision and memory."""

import functools
import threading

import pytest
import torch
from clipped_sums import clipped_gradient_sum
from reference import clipped_sum_by_loop, relative_error
from torch import nn

from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.gradients import convolution, products
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.gradients.linear import Tokens

# The tests' networks end in a tanh: rounding of the forward pass alone gives a few 1e-7.
TOLERANCE = 1e-5


def squared_error(output, target):
    return (output.flatten(1) - target).square().sum(1).mean()


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "dilation", "padding"),
    [
        ((9, 8), (3, 2), (1, 1), (1, 1), (0, 0)),
        ((9, 8), (3, 2), (1, 1), (2, 3), "same"),
        ((9, 8), (1, 3), (2, 1), (2, 3), (1, 2)),
        ((9, 8), (3, 2), (3, 2), (1, 1), (1, 2)),
        # An image with fewer positions than the stride.
        ((1, 2), (1, 3), (3, 2), (1, 1), (1, 2)),
        ((2, 1), (3, 2), (1, 1), (1, 1), (1, 2)),
    ],
)
def test_gram_matrices_of_patches_are_taken_without_patches(image, kernel, stride, dilation, padding):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    x = torch.randn(4, 3, *image)
    conv = convolution.geometry(layer.weight.shape, layer.stride, layer.padding, layer.dilation, layer.groups)
    patches = convolution.Patches(conv, x, torch.randn_like(layer(x)), augmult=2)
    right = patches.right(slice(0, 2), torch.float64)
    torch.testing.assert_close(patches.right_gram(slice(0, 2)), right @ right.mT)


@pytest.mark.parametrize("batch_stride", [8, 8 * 16])
def test_the_sum_of_a_grouped_convolution_is_that_of_one_channels_last_image(batch_stride):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1, groups=4).double()
    x = torch.randn(1, 8, 4, 4, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    conv = convolution.geometry(layer.weight.shape, layer.stride, layer.padding, layer.dilation, layer.groups)
    channels_last = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (batch_stride, 1, 32, 8))
    patches, total = convolution.Patches(conv, channels_last, 2 * layer(x).detach(), augmult=1), torch.zeros(4, 2, 18)
    patches.add_total(torch.ones(1, 1), total)
    torch.testing.assert_close(patches.weight(total[None])[0], expected.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def kept_gram(monkeypatch):
    """Gradients of products are kept until the norms of all are known, and measured by Gram matrices."""
    monkeypatch.setattr(products, "kept_method", lambda size: "Gram")
    monkeypatch.setattr(products.Product, "stream", Contribution.stream)


def summed_product(output, target):
    return (output * target).flatten(1).sum(1).mean()


@pytest.mark.usefixtures("kept_gram")
@pytest.mark.parametrize("positions", [96, 1024])
def test_terms_that_round_all_in_one_direction_do_not_exceed_the_bound(positions):
    """After a large first term, every small one rounds up; the last one takes away what exact arithmetic has."""
    layer, x, g = nn.Linear(300, 300, bias=False), torch.zeros(1, positions, 300), torch.zeros(positions)
    x[0, :, 0] = 1
    g[0], g[1:-1] = 1.75, 0.51 * torch.finfo(torch.float32).eps
    g[-1] = -float(g[:-1].double().sum())

    def loss(output, target):
        return (output[:, :, 0] * g).sum(1).mean()

    sums, _ = clipped_gradient_sum(layer, loss, x, x, clip_plan=ClipPlan.flat(max_grad_norm=1e-7))
    assert float(sums["weight"].double().norm()) <= 1e-7 * (1 + 1e-6)


@pytest.fixture
def settings_of_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_products_behind_a_bound_of_float32_rounding_are_in_float32(monkeypatch, settings_of_precision):
    def precisions():
        backends = torch.backends
        return [
            backend.fp32_precision
            for backend in (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.mkldnn.conv)
        ]

    def watched(function):
        def run(*args):
            seen.append(precisions())
            return function(*args)

        return run

    torch.set_float32_matmul_precision("medium")
    before, seen = precisions(), []
    assert "ieee" not in before[:2]
    monkeypatch.setattr(products, "kept_method", lambda size: "Gram")
    monkeypatch.setattr(Tokens, "add_total", watched(Tokens.add_total))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    clipped_gradient_sum(
        model, squared_error, torch.randn(5, 4), torch.randn(5, 2), clip_plan=ClipPlan.flat(max_grad_norm=1.0)
    )
    assert len(seen) == 2
    assert all(precision == "ieee" for found in seen for precision in found)
    assert precisions() == before


@pytest.mark.parametrize("plan", [ClipPlan.flat(max_grad_norm=1e-3), ClipPlan.per_layer(max_grad_norm=1e-3)])
@pytest.mark.parametrize("way", ["formed", "Gram"])
def test_a_gradient_that_cancels_contributes_no_more_than_the_bound(monkeypatch, way, plan):
    """An almost constant image of scale 1e4 under a loss whose gradient sums to almost nothing."""
    monkeypatch.setattr(products, "kept_method", lambda size: way)
    if plan.kind == "flat":
        monkeypatch.setattr(products.Product, "stream", Contribution.stream)  # measures as when kept
    monkeypatch.setattr(products, "streamed_method", lambda size, *, by_products: way)
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, bias=False)
    x = 1e4 + 1e-3 * torch.randn(1, 8, 9, 9)
    direction = torch.randn(1, 8, 7, 7)
    direction -= direction.mean((2, 3), keepdim=True)
    direction *= 100
    sums, _ = clipped_gradient_sum(layer, summed_product, x, direction, clip_plan=plan)
    # In exact arithmetic the norm is about 1e4 times smaller than the terms that cancel.
    assert float(sums["weight"].double().norm()) <= plan.sensitivity * (1 + 1e-3)


@pytest.mark.usefixtures("kept_gram")
def test_where_the_sum_is_rounded_anew_the_norm_holds_a_bound_of_its_rounding():
    """Two positions whose terms cancel: what is left of the norm is the bound of the sum's rounding."""
    torch.manual_seed(0)
    patch, output_gradient = torch.randn(6), torch.randn(5)
    rounding = 12 * torch.finfo(torch.float32).eps * 2 * float(patch.norm() * output_gradient.norm())

    def norm(layer, x, target, augmult=1):
        plan = ClipPlan.flat(max_grad_norm=1.0)
        _, norms = clipped_gradient_sum(layer, summed_product, x, target, clip_plan=plan, augmult=augmult)
        return float(norms)

    tokens, target = torch.stack([patch, patch])[None], torch.stack([output_gradient, -output_gradient])[None]
    assert norm(nn.Linear(6, 5, bias=False), tokens, target) == pytest.approx(rounding, rel=1e-3)
    # The positions of two views are positions of the example; the loss is a mean over its views.
    views = tokens.transpose(0, 1), target.transpose(0, 1)
    assert norm(nn.Linear(6, 5, bias=False), *views, augmult=2) == pytest.approx(rounding / 2, rel=1e-3)
    images = views[0].mT.unsqueeze(3).contiguous(), views[1].mT.unsqueeze(3).contiguous()
    assert norm(nn.Conv2d(6, 5, 1, bias=False), *images, augmult=2) == pytest.approx(rounding / 2, rel=1e-3)


@pytest.mark.usefixtures("kept_gram")
def test_what_is_measured_is_at_least_the_gradient_and_the_rounding_of_its_sum():
    """Both point the same way in the worst case, so their lengths are added, and not their squares."""
    torch.manual_seed(0)
    patch, output_gradient = torch.randn(6), torch.randn(5)
    rounding = 12 * torch.finfo(torch.float32).eps * 2 * float(patch.norm() * output_gradient.norm())
    rest = torch.randn(5)
    target = torch.stack([output_gradient, rest * (rounding / (patch.norm() * rest.norm())) - output_gradient])
    left = float((target.double().T @ torch.stack([patch, patch]).double()).norm())
    assert left == pytest.approx(rounding, rel=0.1)
    x, plan = torch.stack([patch, patch])[None], ClipPlan.flat(max_grad_norm=1.0)
    _, norms = clipped_gradient_sum(nn.Linear(6, 5, bias=False), summed_product, x, target[None], clip_plan=plan)
    assert float(norms) == pytest.approx(left + rounding, rel=1e-3)


def test_each_thread_has_its_own_memory_for_intermediate_results():
    scratch, places = products.Scratch(), []
    for target in (lambda: places.append(scratch((4,), torch.float32, torch.device("cpu"))),) * 2:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert places[0].data_ptr() != places[1].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "precision"), [("formed", "highest"), ("Gram", "highest"), ("Gram", "high")])
def test_every_way_equals_the_loop_on_a_gpu(monkeypatch, request, way, precision):
    """Also where a user lets products of matrices use TF32: what is measured is not rounded to it."""
    monkeypatch.setattr(products, "kept_method", lambda size: way)
    request.addfinalizer(functools.partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    layer, plan = nn.Conv2d(16, 32, 3, padding=1), ClipPlan.flat(max_grad_norm=0.1)
    x, y = torch.randn(4, 16, 9, 9), torch.randn(4, 32 * 81)
    expected, _ = clipped_sum_by_loop(layer, x, y.double(), plan, squared_error)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        sums, _ = clipped_gradient_sum(layer.cuda(), squared_error, x.cuda(), y.cuda(), clip_plan=plan)
    assert relative_error({name: value.cpu() for name, value in sums.items()}, expected) < TOLERANCE
