"""One example, one contribution: what the checks of the model refuse."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.privacy import GradientEngine
from dp_lightning.privacy.checks import per_example
from dp_lightning.privacy.checks.layers import refuse_mixing_modules
from dp_lightning.privacy.checks.losses import Division
from dp_lightning.privacy.checks.per_example import check_per_example


def check(model, loss_of=None, *, reduction="mean", augmult=1):
    torch.manual_seed(0)
    x, y = torch.randn(2, 6), torch.tensor([0, 2])
    views = x.repeat_interleave(augmult, 0)
    views, labels = views + torch.randn_like(views), y.repeat_interleave(augmult)
    more_x, more_y = torch.randn(12, 6), torch.arange(12) % 3
    refused = 100  # a label that no class has

    def default(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    engine = GradientEngine(model)
    try:
        check_per_example(
            model,
            engine,
            loss_of or default,
            Division((x, y), [(x[i : i + 1], y[i : i + 1]) for i in range(2)], [1, 1]),
            [
                Division((x, y + refused), [(x, y + refused)], [2]),
                Division((x * math.nan, y), [(x * math.nan, y)], [2]),
                Division((more_x, more_y), [(more_x[:3], more_y[:3]), (more_x[3:], more_y[3:])], [3, 9]),
            ],
            few=[
                (
                    (torch.cat([views.split(augmult)[i] for i in order]), y[order].repeat_interleave(augmult)),
                    [(views.split(augmult)[i], labels.split(augmult)[i]) for i in order],
                )
                for order in ([0, 1], [1, 0])
            ],
            augmult=augmult,
            loss_reduction=reduction,
        )
    finally:
        engine.detach()


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def test_an_ordinary_network_with_dropout_passes_and_keeps_its_mode():
    model = mlp()
    check(model)
    check(model, augmult=3)
    assert model[2].training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


class BatchMean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class HiddenUse(nn.Module):
    """The weight of one layer is used a second time through a function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.inner(x)), self.inner.weight))


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


def test_statistics_of_the_batch_are_refused():
    with pytest.raises(ModelError, match="mixes examples"):
        check(nn.Sequential(BatchMean(), mlp()))


def test_a_weight_used_outside_of_its_module_is_refused_by_name():
    with pytest.raises(ModelError, match=r"inner\.weight"):
        check(HiddenUse())


def test_a_buffer_computed_from_examples_is_refused_by_name():
    model = nn.Sequential(RunningMean(), mlp())
    with pytest.raises(ModelError, match=r"0\.mean"):
        check(model)
    assert not model[0].mean.any()


def test_a_class_weighted_mean_is_refused():
    model = mlp()
    weight = torch.tensor([1.0, 1.0, 5.0])
    with pytest.raises(ModelError, match="class-weighted"):
        check(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1], weight=weight))


@pytest.mark.parametrize(("reduction", "declared"), [("sum", "mean"), ("mean", "sum")])
def test_a_wrong_loss_reduction_is_refused_with_the_fix(reduction, declared):
    model = mlp()

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    with pytest.raises(ModelError, match=f"Set privacy.loss_reduction to '{reduction}'"):
        check(model, loss, reduction=declared)
    check(model, loss, reduction=reduction)


def test_a_random_training_step_is_refused():
    model = mlp()
    with pytest.raises(ModelError, match="draws random numbers"):
        check(model, lambda batch: F.cross_entropy(model(batch[0] * torch.rand(1)), batch[1]))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(6), nn.BatchNorm2d(6), nn.SyncBatchNorm(6), nn.InstanceNorm2d(6, track_running_stats=True)]
)
def test_layers_that_mix_examples_are_refused_by_name_with_the_fix(layer):
    model = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(ModelError, match=r"Module '1' \(.*(GroupNorm|track_running_stats)"):
        refuse_mixing_modules(model)


def test_instance_norm_without_running_statistics_is_allowed():
    refuse_mixing_modules(nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.GroupNorm(2, 6), nn.LayerNorm(6)))


def test_compiled_modules_are_refused():
    compiled = nn.Linear(6, 6)
    compiled.compile()
    for model in (nn.Sequential(torch.compile(nn.Linear(6, 6))), nn.Sequential(compiled)):
        with pytest.raises(ModelError, match=r"Module '0' is compiled.*without torch.compile"):
            refuse_mixing_modules(model)


class Amplifies(nn.Module):
    """Treats its examples apart, and makes differences of float32 rounding a million times larger."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 512), nn.Linear(512, 3)
        self.middle = nn.Linear(512, 512)

    def forward(self, x):
        x = self.middle(torch.sin(1000 * self.inner(x)))
        return self.head(torch.sin(1000 * torch.sin(1000 * x)))


@pytest.mark.parametrize(("scale", "message"), [(1.0, "mixes examples"), (1e-3, "differs from the gradient")])
def test_rounding_alone_is_not_refused(scale, message, monkeypatch):
    torch.manual_seed(0)
    model = Amplifies()
    before = {name: (p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}

    def loss(batch):
        return scale * F.cross_entropy(model(batch[0]), batch[1]) + 100

    check(model, loss)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.data_ptr() == before[name][1]
    # In float32 it would be.
    monkeypatch.setattr(per_example, "_float64", lambda batch: batch)
    with pytest.raises(ModelError, match=message):
        check(model, loss)


def test_a_model_that_cannot_run_in_float64_is_refused_for_what_was_found():
    class Casts(HiddenUse):
        def forward(self, x):
            return super().forward(x.float())

    with pytest.raises(ModelError, match=r"inner\.weight"):
        check(Casts())


def weighted(ignored):
    weight = None if ignored else torch.tensor([1.0, 1.0, 99.0])
    return lambda model: (
        lambda batch: F.cross_entropy(
            model(batch[0]), batch[1].clamp(max=1), weight=weight, **({"ignore_index": 2} if ignored else {})
        )
    )


def hard_examples(model):
    def loss(batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.topk(min(len(each), max(4, len(each) // 2))).values.mean()

    return loss


def contrastive(model):
    def loss(batch):
        z = model(batch[0])
        alike = (batch[1][:, None] == batch[1]).float() - torch.eye(len(z))
        return F.cross_entropy(z, batch[1]) + (alike * (z @ z.T)).sum() / len(z)

    return loss


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (weighted(ignored=False), "cross_entropy with `weight`: such a class-weighted"),
        (weighted(ignored=True), "cross_entropy with `ignore_index`"),
        (hard_examples, "12 examples together .* is not what the losses of 3 and 9 of them give"),
        (contrastive, "mixes examples"),
    ],
)
def test_mixing_that_two_examples_do_not_show_is_refused(loss_of, message):
    model = mlp()
    with pytest.raises(ModelError, match=message):
        check(model, loss_of(model))


def test_equal_class_weights_are_allowed():
    model = mlp()
    check(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1], weight=torch.full((3,), 2.0)))


def test_a_slow_average_of_earlier_batches_is_refused():
    model, kept = mlp(), []

    def loss(batch):
        own = F.cross_entropy(model(batch[0]), batch[1])
        kept.append(own.detach() if not kept else 0.999 * kept[-1] + 0.001 * own.detach())
        return own / kept[-1]

    with pytest.raises(ModelError, match=r"another loss for the same batch after it has seen others|not finite"):
        check(model, loss)


class Beside(nn.Module):
    """A network, and a layer that gets a gradient a thousand times smaller from all examples at once."""

    def __init__(self):
        super().__init__()
        self.net, self.side = mlp(), nn.Linear(6, 3)

    def forward(self, x):
        return self.net(x), self.side(x)


def test_mixing_in_a_layer_with_a_small_gradient_is_refused():
    model = Beside()

    def loss(batch):
        z, side = model(batch[0])
        return F.cross_entropy(z, batch[1]) + 1e-6 * (side - side.mean(0)).square().mean()

    with pytest.raises(ModelError, match="parameter 'side"):
        check(model, loss)


def test_a_small_gradient_that_no_layer_brings_is_refused():
    model = mlp()

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 1e-4 * model[0].weight.square().sum()

    with pytest.raises(ModelError, match=r"parameter '0\.weight'.*penalty.*weight_decay"):
        check(model, loss)


def test_a_parameter_that_gets_noise_alone_is_refused_without_float64():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.unseen = mlp(), nn.Linear(6, 3)

        def forward(self, x):
            return self.net(x.float()) + 2e-4 * F.linear(x.float(), self.unseen.weight)

    with pytest.raises(ModelError, match=r"parameter 'unseen\.weight'"):
        check(Casts())


def test_a_module_that_takes_no_made_up_numbers_is_tried_with_others():
    model = mlp()

    def loss(batch):
        assert len(batch[0]) < 12, "takes few alone"
        return F.cross_entropy(model(batch[0]), batch[1])

    check(model, loss)


def weighted_by_hand(labels, each):
    weights = torch.tensor([1.0, 1.0, 9.0])[labels]
    return (weights * each).sum() / weights.sum()


def above_a_threshold(labels, each):
    kept = (each > 0.8).float()
    return (each * kept).sum() / kept.sum().clamp(min=1)


def by_their_losses(labels, each):
    return (each * (each / each.mean()).detach()).mean()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("reduce", [weighted_by_hand, above_a_threshold, by_their_losses])
def test_a_head_that_starts_small_hides_no_mixing(reduce, scale):
    torch.manual_seed(0)
    model = mlp()
    with torch.no_grad():
        for parameter in model[3].parameters():
            parameter *= scale
    before = [parameter.detach().clone() for parameter in model.parameters()]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ModelError, match=r"mixes examples|The loss is the sum"):
        check(model, lambda batch: reduce(batch[1], F.cross_entropy(model(batch[0]), batch[1], reduction="none")))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def test_class_weights_that_do_not_enter_the_gradient_are_allowed():
    model, weight = mlp(), torch.tensor([1.0, 1.0, 9.0])

    def loss(batch):
        logits = model(batch[0])
        with torch.no_grad():
            F.cross_entropy(logits, batch[1], weight=weight)
        each = [F.cross_entropy(one, label, ignore_index=9) for one, label in zip(logits, batch[1], strict=True)]
        return torch.stack(each).mean()

    check(model, loss)


def test_a_buffer_that_is_no_number_may_stay():
    model = mlp()
    model.register_buffer("unknown", torch.tensor(math.nan))
    check(model)


def test_a_device_without_float64_is_tried_in_float32(monkeypatch):
    monkeypatch.setattr(per_example, "_has_float64", lambda model: False)
    monkeypatch.setattr(per_example, "_in_float64", None)
    check(mlp())
    with pytest.raises(ModelError, match=r"inner\.weight"):
        check(HiddenUse())
    with pytest.raises(ModelError, match="mixes examples"):
        check(nn.Sequential(BatchMean(), mlp()))
