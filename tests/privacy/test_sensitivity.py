"""What one example can do to the sum: at most the declared sensitivity, whatever the example is."""

import math

import pytest
import torch
from clipped_sums import clipped_gradient_sum
from small_steps import plan_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.models import SmallCNN
from dp_lightning.privacy import ClipPlan, PrivateStep
from dp_lightning.privacy.gradients import contribution
from dp_lightning.privacy.gradients.contribution import add_weighted, part_norms

PLANS = [
    ClipPlan.flat(max_grad_norm=0.5),
    ClipPlan.flat(max_grad_norm=2.0, factor="automatic"),
    ClipPlan.per_layer(max_grad_norm=1.5),
    ClipPlan.per_layer(max_grad_norm=1.0, factor="automatic"),
]
# Float32 rounding of a sum of a few clipped gradients.
ROUNDING = 1e-5


def distance(a, b):
    return float(torch.sqrt(sum((a[name].double() - b[name].double()).square().sum() for name in a)))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{plan.factor}")
@pytest.mark.parametrize("augmult", [1, 4])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15, math.inf, math.nan])
def test_an_example_moves_the_sum_by_at_most_the_sensitivity_whatever_its_views_are(plan, augmult, scale):
    torch.manual_seed(0)
    model = SmallCNN(10, in_channels=1, image_size=8)
    x, y = torch.randn(3 * augmult, 1, 8, 8), torch.randint(10, (3 * augmult,))
    rest = 2 * augmult
    without, _ = clipped_gradient_sum(model, F.cross_entropy, x[:rest], y[:rest], clip_plan=plan, augmult=augmult)
    one, several = x.clone(), x.clone()
    one[-1] *= scale
    several[rest:] *= scale
    for rows in (one, several):
        with_it, _ = clipped_gradient_sum(model, F.cross_entropy, rows, y, clip_plan=plan, augmult=augmult)
        moved = distance(with_it, without)
        assert moved <= plan.sensitivity * (1 + ROUNDING)
        assert moved <= ROUNDING or math.isfinite(scale)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{plan.factor}")
def test_adversarial_gradients_attain_the_sensitivity(plan):
    """Every layer's gradient is long, so each group is at its bound: the declared number is tight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    def loss(output, target):
        return 1e4 * (output - target).sum(1).mean()

    sums, _ = clipped_gradient_sum(model, loss, torch.ones(1, 4), torch.zeros(1, 3), clip_plan=plan)
    norm = distance(sums, {name: torch.zeros_like(value) for name, value in sums.items()})
    assert norm == pytest.approx(plan.sensitivity, rel=1e-4)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{plan.factor}")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20, 1e38])
@pytest.mark.parametrize("asks", [True, False], ids=["as on a CPU", "as on a GPU"])
def test_a_non_finite_gradient_contributes_zero(monkeypatch, plan, value, asks):
    monkeypatch.setattr(contribution, "read_at_once", lambda device: asks)
    torch.manual_seed(0)
    model = SmallCNN(10, in_channels=1, image_size=8)
    x, y = torch.randn(6, 1, 8, 8), torch.randint(10, (6,))
    bad = x.clone()
    bad[2, 0, 3, 3] = value
    rest = torch.tensor([0, 1, 3, 4, 5])
    sums, norms = clipped_gradient_sum(model, F.cross_entropy, bad, y, clip_plan=plan)
    expected, _ = clipped_gradient_sum(model, F.cross_entropy, x[rest], y[rest], clip_plan=plan)
    assert all(total.isfinite().all() for total in sums.values())
    if math.isfinite(value):
        # A huge but finite pixel may still have a finite gradient; then it is clipped like any other.
        assert distance(sums, expected) <= plan.sensitivity * (1 + ROUNDING)
    else:
        assert not norms[2].isfinite().all()
        assert distance(sums, expected) <= 1e-5


def test_a_gradient_too_long_for_float32_contributes_zero():
    model = nn.Linear(1, 1, bias=False)

    def loss(output, target):
        return (output * target).mean()

    sums, _ = clipped_gradient_sum(
        model, loss, torch.tensor([[1e25], [2.0]]), torch.tensor([[1.0], [1.0]]), clip_plan=ClipPlan.flat()
    )
    torch.testing.assert_close(sums["weight"], torch.tensor([[1.0]]))


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, 1e-13, 1e13])
def test_impossible_bounds_are_refused(norm):
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        ClipPlan.flat(max_grad_norm=norm)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{plan.factor}")
@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_examples_that_are_not_finite_are_counted(plan, examples):
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    x = torch.randn(5, 2)
    x[1, 0], x[4, 1] = math.nan, math.inf
    private = PrivateStep(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        TensorDataset(x, torch.zeros(5, dtype=torch.long)),
        plan=plan_of(5),
        clip_plan=plan,
        examples=examples,
        max_physical_batch_size=3,
    )
    for batch in private.batches():
        private.accumulate(batch)
    assert int(private.discarded) == 2
    private.release()
    assert int(private.discarded) == 0
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("plan", [ClipPlan.per_layer(max_grad_norm=1.0), ClipPlan.flat(max_grad_norm=1.0)])
def test_a_layer_whose_gradient_is_not_finite_contributes_zero_whatever_the_others_do(plan):
    """The first layer's gradient overflows, the last one's does not: flat clipping drops both, per-layer one."""

    class Explodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x):
            inner = self.first(x)
            # A finite value with an infinite derivative.
            return self.last(inner + torch.sqrt(inner - inner.detach()))

    sums, norms = clipped_gradient_sum(
        Explodes(), F.cross_entropy, torch.randn(3, 2), torch.tensor([0, 1, 2]), clip_plan=plan
    )
    assert not norms.isfinite().all()
    assert not sums["first.weight"].any()
    assert bool(sums["last.weight"].any()) == (plan.kind == "per_layer")
    assert float(torch.cat([value.flatten() for value in sums.values()]).norm()) <= 3 * plan.sensitivity


LONG = {
    "linear of one token": (lambda: nn.Linear(768, 1536, bias=False), (768,)),
    "linear of many tokens": (lambda: nn.Linear(768, 1536, bias=False), (197, 768)),
    "convolution": (lambda: nn.Conv2d(128, 128, 3, padding=1, bias=False), (128, 16, 16)),
    "scale and shift": (lambda: nn.LayerNorm([64, 32, 32]), (64, 32, 32)),
    "embedding": (lambda: nn.Embedding(4096, 512), (4096,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [ClipPlan.flat(), ClipPlan.per_layer()], ids=["flat", "per-layer"])
@pytest.mark.parametrize("kind", LONG)
def test_a_long_gradient_does_not_exceed_the_sensitivity(kind, plan, dtype):
    """Equal numbers round all in one direction: a float32 sum of their squares is too small by a thousandth."""
    torch.manual_seed(0)
    make, shape = LONG[kind]
    layer = make()
    for value in (1.425, 0.7, 3.3, None):
        x = torch.randn(1, *shape) if value is None else torch.full((1, *shape), value)
        if kind == "embedding":
            x = torch.arange(4096).unsqueeze(0)
        slope = (torch.randn if value is None else torch.ones)(1, *layer(x).shape[1:]) * (value or 1.0) * 10.0

        def loss(output, target):
            return (output.float() * target).sum()

        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            sums, _ = clipped_gradient_sum(layer, loss, x, slope, clip_plan=plan)
        norm = math.sqrt(sum(float(total.double().square().sum()) for total in sums.values()))
        assert 0.999 * plan.sensitivity <= norm <= plan.sensitivity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [64 * 9, 64 * 576])
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_added_up_is_what_was_measured(dtype, numbers, turned):
    """The numbers of a gradient of 16 bits are those in memory, not rounded again, and a weight of zero takes none."""
    torch.manual_seed(0)
    rows, weights = torch.randn(37, 64, numbers // 64).to(dtype), torch.rand(37)
    rows[3], rows[8, 1, 1], weights[3], weights[8] = torch.inf, torch.nan, 0.0, 0.0
    before = torch.randn((numbers // 64, 64) if turned else (64, numbers // 64))
    total = before.clone().mT if turned else before.clone()
    add_weighted(total, rows, weights)
    kept = rows.double()[weights > 0]
    expected = (before.mT if turned else before).double() + (kept * weights[weights > 0].double()[:, None, None]).sum(0)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=2e-5)
    norms = part_norms(rows)[weights > 0].double().square().sum(1).sqrt()
    torch.testing.assert_close(norms, kept.flatten(1).norm(dim=1), rtol=1e-6, atol=0)


def test_a_factor_that_overflows_the_gradient_leaves_the_example_out():
    """The factor of 'automatic' can be large, and a finite norm does not make every finite factor safe."""
    linear, x, slope = nn.Linear(2048, 64, bias=False), torch.full((2, 2048), 5e-40), torch.zeros(2, 64)
    slope[0, 0] = 1e37
    x[1], slope[1] = 1.0, 1.0
    plan = ClipPlan.flat(max_grad_norm=10.0, factor="automatic")
    sums, _ = clipped_gradient_sum(linear, lambda y, t: (y * t).sum(1), x, slope, clip_plan=plan)
    alone, _ = clipped_gradient_sum(linear, lambda y, t: (y * t).sum(1), x[1:], slope[1:], clip_plan=plan)
    torch.testing.assert_close(sums["weight"], alone["weight"])
