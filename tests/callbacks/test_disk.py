"""DiSK in full: two gradients per example, combined before the one clip, against the recursion written out."""

import copy
import itertools
import json

import pytest
import torch
from plain_run import N, Plain, examples, loader, privacy, trainer
from torch import nn
from torch.nn import functional as F

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.postprocess import Kalman, Momentum
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.disk import DiSK, Extrapolation
from dp_lightning.privacy.gradients import GradientEngine
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum

GAIN, LR = 0.7, 0.5


def net():
    # Convolution, normalization, a shared module, and a module without a rule of its own.
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), shared, nn.Tanh(), shared, Scaled(), nn.Linear(6, 3))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return x * self.scale.exp()


def gradient(model, x, y):
    grads = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), list(model.parameters()))
    return [g.double() for g in grads]


def written_out(model, steps, gamma, bound):
    """DiSK on the whole data set without noise, one example at a time."""
    c = 1.0 if gamma is None else (1 - GAIN) / (GAIN * gamma)
    length = (1 - GAIN) / GAIN if gamma is None else gamma
    model = copy.deepcopy(model).double()
    previous = [p.detach().clone() for p in model.parameters()]
    estimate = None
    xs, ys = examples().tensors
    for _ in range(steps):
        here = [p.detach().clone() for p in model.parameters()]
        ahead = copy.deepcopy(model)
        with torch.no_grad():
            for p, now, before in zip(ahead.parameters(), here, previous, strict=True):
                p.add_(length * (now - before))
        total = [torch.zeros_like(p) for p in here]
        for x, y in zip(xs.double(), ys, strict=True):
            first, second = gradient(ahead, x, y), gradient(model, x, y)
            combined = [c * a + (1 - c) * b for a, b in zip(first, second, strict=True)]
            norm = torch.cat([g.flatten() for g in combined]).norm()
            for t, g in zip(total, combined, strict=True):
                t += g * min(1.0, bound / float(norm))
        fresh = [t / N for t in total]
        estimate = (
            fresh if estimate is None else [(1 - GAIN) * e + GAIN * f for e, f in zip(estimate, fresh, strict=True)]
        )
        previous = here
        with torch.no_grad():
            for p, e in zip(model.parameters(), estimate, strict=True):
                p -= LR * e
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fitted(folder, module, *, gamma, loss_reduction="mean", **kwargs):
    """Every example in every step, so that there is nothing random."""
    callback = privacy(
        noise_multiplier=0.0,
        not_private=True,
        expected_batch_size=N,
        max_grad_norm=0.5,
        max_physical_batch_size=16,
        disk=DiSK(GAIN, gamma),
        loss_reduction=loss_reduction,
    )
    post = PostProcessCallback([Kalman(gain=GAIN, applies_to="all")])
    run = trainer(folder, callback, post, **{"max_epochs": 5, **kwargs})
    return run, module


def parameters(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("gamma", [None, 0.1, 0.8])
def test_a_run_takes_the_steps_of_the_recursion(tmp_path, gamma):
    torch.manual_seed(0)
    module = Plain(net(), lr=LR)
    before = parameters(module)
    expected = written_out(module.net, 5, gamma, bound=0.5)
    run, _ = fitted(tmp_path, module, gamma=gamma)
    run.fit(module, loader())
    # float32 over five steps; the finite difference is divided by gamma.
    torch.testing.assert_close(parameters(module).double(), expected, rtol=2e-4, atol=2e-5)
    # Neither DP-SGD nor the filter alone ends there.
    assert float((parameters(module) - before).norm()) > 0.05
    plain = Plain(copy.deepcopy(module.net), lr=LR)
    torch.nn.utils.vector_to_parameters(before, plain.parameters())
    alone = trainer(
        tmp_path,
        privacy(noise_multiplier=0.0, not_private=True, expected_batch_size=N, max_grad_norm=0.5),
        PostProcessCallback([Kalman(gain=GAIN, applies_to="all")]),
        max_epochs=5,
    )
    alone.fit(plain, loader())
    assert float((parameters(plain).double() - expected).norm()) > 1e-3


def test_with_gamma_of_one_point_both_ways_are_the_same(tmp_path):
    torch.manual_seed(0)
    module = Plain(lr=LR)
    ends = []
    for gamma in (None, (1 - GAIN) / GAIN):
        trained = copy.deepcopy(module)
        fitted(tmp_path, trained, gamma=gamma)[0].fit(trained, loader())
        ends.append(parameters(trained))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [None, 0.1])
def test_an_interrupted_run_goes_on_exactly(tmp_path, gamma):
    torch.manual_seed(0)
    module = Plain(lr=LR)
    whole, half, again = (copy.deepcopy(module) for _ in range(3))
    fitted(tmp_path / "whole", whole, gamma=gamma)[0].fit(whole, loader())
    first, _ = fitted(tmp_path / "half", half, gamma=gamma, max_epochs=2)
    first.fit(half, loader())
    first.save_checkpoint(tmp_path / "half" / "two.ckpt")
    second, _ = fitted(tmp_path / "half", again, gamma=gamma)
    second.fit(again, loader(), ckpt_path=tmp_path / "half" / "two.ckpt", weights_only=True)
    assert torch.equal(parameters(again), parameters(whole))


def sum_of(model, clip_plan, disk, parameters_before, x, y):
    """The clipped sum of one logical batch, as a run takes it."""
    engine = GradientEngine(model)
    total = ClippedSum(engine.parameters, clip_plan)
    extrapolation = Extrapolation(engine.parameters, disk.length)
    extrapolation.load_state_dict(parameters_before)
    extrapolation.advance()
    total.begin(len(x))
    engine.begin(len(x), total.take, passes=2)
    for weight, move in ((1 - disk.weight, None), (disk.weight, extrapolation.away)):
        if move:
            move()
        engine.again()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        engine.scale(loss, weight)
        loss.backward()
    engine.finish()
    engine.end()
    extrapolation.back()
    total.end()
    engine.detach()
    return torch.cat([value.flatten().double() for value in total.sums.values()])


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("gamma", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("clip_plan", [ClipPlan.flat(max_grad_norm=1.3), ClipPlan.per_layer(max_grad_norm=1.3)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_one_example_moves_the_sum_by_at_most_the_sensitivity(gamma, clip_plan, scale):
    """Neighbours that differ by one example, with weights of up to 43 and -42 on its two gradients."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = net()
        before = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
        x, y = torch.randn(6, 5), torch.randint(3, (6,))
        x[-1] *= scale
        disk = DiSK(GAIN, gamma)
        after = [p.detach().clone() for p in model.parameters()]
        difference = sum_of(model, clip_plan, disk, before, x, y) - sum_of(
            model, clip_plan, disk, before, x[:-1], y[:-1]
        )
        # The two sums are rounded to float32.
        assert float(difference.norm()) <= clip_plan.sensitivity * (1 + 1e-5) + 1e-5
        assert all(torch.equal(a, p) for a, p in zip(after, model.parameters(), strict=True))


def test_parameters_are_left_at_the_step_after_an_error(tmp_path):
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                raise RuntimeError("stopped")
            return super().training_step(batch, batch_idx)

    class Copy(PostProcessCallback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.last = parameters(pl_module)

    callback = privacy(disk=DiSK(GAIN))
    module, post = Fails(lr=LR), Copy([Kalman(gain=GAIN, applies_to="all")])
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, callback, post).fit(module, loader())
    assert torch.equal(parameters(module), post.last)


@pytest.mark.parametrize(
    "transforms",
    [
        [Kalman(gain=0.6, applies_to="all")],
        [Kalman(gain=GAIN)],
        [Kalman(gain=GAIN, applies_to="all", exclude=["net.0.*"])],
        [Kalman(gain=GAIN, applies_to="all", include=["net.0.*"])],
        [Momentum(0.9, applies_to="all")],
        [Momentum(0.9, applies_to="all"), Kalman(gain=GAIN, applies_to="all")],
        [],
        None,
    ],
    ids=[
        "other gain",
        "matrices only",
        "without a layer",
        "one layer",
        "momentum",
        "not first",
        "nothing",
        "no callback",
    ],
)
def test_gradients_of_disk_without_its_filter_are_refused(tmp_path, transforms):
    callback: PrivacyCallback = privacy(disk=DiSK(GAIN))
    others = [] if transforms is None else [PostProcessCallback(transforms)]
    with pytest.raises(ConfigurationError, match=r"Kalman with gain 0\.7 and applies_to: all"):
        trainer(tmp_path, callback, *others).fit(Plain(), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize(("gain", "gamma"), [(1.5, None), (1.0, None), (0.0, None), (0.7, 0.0), (0.7, float("inf"))])
def test_settings_out_of_range_are_refused(gain, gamma):
    with pytest.raises(ConfigurationError, match=r"privacy\.disk\.gain" if gamma is None else r"privacy\.disk\.gamma"):
        DiSK(gain, gamma)


@pytest.mark.parametrize(("gamma", "words"), [(None, "at DiSK's extrapolated point"), (0.1, "two per example")])
def test_the_statement_says_where_gradients_are_taken(tmp_path, gamma, words):
    run, module = fitted(tmp_path, Plain(), gamma=gamma, max_epochs=1)
    run.fit(module, loader())
    gradients = json.loads((tmp_path / "privacy_statement.json").read_text())["clipping"]["gradients"]
    assert words in gradients
    assert "gain 0.7" in gradients
    assert gradients in (tmp_path / "privacy_statement.md").read_text()


def test_the_weights_are_those_of_the_paper():
    for gain, gamma in itertools.product((0.3, 0.7), (0.05, 0.5)):
        assert DiSK(gain, gamma).weight == pytest.approx((1 - gain) / (gain * gamma))
    assert DiSK(0.7).length == pytest.approx(3 / 7)
    assert DiSK(0.7).weight == 1


class Summed(Plain):
    """The sum over examples, with a mask that is drawn in every pass."""

    def __init__(self, reduction="sum", dropout=0.0):
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3)), lr=LR)
        self.reduction = reduction

    def training_step(self, batch, batch_idx):
        self.seen = [*getattr(self, "seen", []), batch_idx]
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction=self.reduction)


@pytest.mark.parametrize("gamma", [None, 0.1])
def test_a_summed_loss_takes_the_same_steps(tmp_path, gamma):
    torch.manual_seed(0)
    mean = Summed("mean")
    summed = copy.deepcopy(mean)
    summed.reduction = "sum"
    for module in (mean, summed):
        run, _ = fitted(tmp_path, module, gamma=gamma, loss_reduction=module.reduction)
        run.fit(module, loader())
    torch.testing.assert_close(parameters(mean), parameters(summed), rtol=1e-5, atol=1e-6)


def test_both_gradients_of_an_example_see_the_same_random_mask(tmp_path):
    """In the first step there is no direction yet, so the two gradients are one, whatever their weights are."""
    steps = []
    for gamma in (None, 0.01):
        torch.manual_seed(0)
        module = Summed("mean", dropout=0.5)
        before = parameters(module)
        fitted(tmp_path, module, gamma=gamma, max_epochs=1)[0].fit(module, loader())
        steps.append(float((parameters(module) - before).norm()))
    # With masks of their own the second would be clipped noise, and far from the first.
    assert steps[1] == pytest.approx(steps[0], rel=0.2)
    torch.manual_seed(0)
    module = Summed("mean", dropout=0.5)
    fitted(tmp_path, module, gamma=0.01, max_epochs=1)[0].fit(module, loader())
    after_trial = module.seen[-8:]
    # Four physical batches, each in two passes with its own number.
    assert after_trial == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("second_pass", [False, True])
def test_a_buffer_that_is_written_in_a_pass_is_found(tmp_path, second_pass):
    class Remembers(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(5))

        def training_step(self, batch, batch_idx):
            in_second = self.trainer.callbacks[0]._gradients._extrapolation._is_away
            if self.trainer.global_step >= 1 and in_second == second_pass:
                self.kept.copy_(batch[0][0])
            return super().training_step(batch, batch_idx)

    run, module = fitted(tmp_path, Remembers(), gamma=0.1)
    with pytest.raises(ModelError, match="'kept' is changed while an example's gradient is computed"):
        run.fit(module, loader())


def test_disk_runs_in_bfloat16_and_logs_once(tmp_path):
    logged, dtypes = [], []

    class Logs(Plain):
        def log(self, name, value, *args, **kwargs):
            if name == "x":
                logged.append(value)
            super().log(name, value, *args, **kwargs)

        def training_step(self, batch, batch_idx):
            output = self.net(batch[0])
            dtypes.append(output.dtype)
            self.log("x", output.sum())
            return F.cross_entropy(output.float(), batch[1])

    run, module = fitted(tmp_path, Logs(), gamma=0.1, max_epochs=1, precision="bf16-mixed")
    run.fit(module, loader())
    # One for each of four physical batches, and none in the second passes.
    assert len(logged) == 4
    assert dtypes[-8:] == [torch.bfloat16] * 8


def test_another_disk_than_the_checkpoints_is_refused(tmp_path):
    run, module = fitted(tmp_path, Plain(), gamma=None, max_epochs=2)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "two.ckpt")
    again, other = fitted(tmp_path, Plain(), gamma=0.1)
    with pytest.raises(ConfigurationError, match=r"checkpoint's run has privacy\.disk \{'gain': 0\.7, 'gamma': None\}"):
        again.fit(other, loader(), ckpt_path=tmp_path / "two.ckpt", weights_only=True)


def test_the_state_of_an_extrapolation_follows_its_parameters():
    double = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    extrapolation = Extrapolation(double, 2.0)
    extrapolation.load_state_dict({"a": torch.ones(2), "gone": torch.ones(3)})
    extrapolation.advance()
    extrapolation.away()
    # x + 2 (x - 1); a parameter that is new has not moved.
    assert torch.equal(double["a"], torch.full((2,), -2.0, dtype=torch.float64))
    assert torch.equal(double["b"], torch.ones(2, dtype=torch.float64))
    extrapolation.back()
    assert torch.equal(double["a"], torch.zeros(2, dtype=torch.float64))


def test_ranks_have_to_agree_on_disk():
    assert privacy(disk=DiSK(GAIN))._settings() != privacy()._settings()
