"""DiSK in full: each example's gradient at the extrapolated point, against the recursion written out."""

import copy

import pytest
import torch
from plain_run import N, Plain, examples, flat, loader, privacy, trainer, without_noise, written
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.postprocess import Kalman, Momentum
from dp_lightning.privacy import ClipPlan, PrivacyPlan, PrivateStep
from dp_lightning.privacy.disk import DiSK

GAIN, LR = 0.7, 0.5


def net():
    """Has a normalization and a shared module."""
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), shared, nn.Tanh(), shared, nn.Linear(6, 3))


def written_out(model, steps, bound, length=(1 - GAIN) / GAIN):
    """The weights after DiSK (Zhang et al. 2025) on the whole data set without noise, one example at a time."""
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
            single = torch.autograd.grad(F.cross_entropy(ahead(x[None]), y[None]), list(ahead.parameters()))
            norm = torch.cat([g.flatten() for g in single]).norm()
            for t, g in zip(total, single, strict=True):
                t += g * min(1.0, bound / float(norm))
        fresh = [t / N for t in total]
        estimate = (
            fresh if estimate is None else [(1 - GAIN) * e + GAIN * f for e, f in zip(estimate, fresh, strict=True)]
        )
        previous = here
        with torch.no_grad():
            for p, e in zip(model.parameters(), estimate, strict=True):
                p -= LR * e
    return flat(model)


def fitted(folder, module, *, ckpt_path=None, mode="together", **kwargs):
    """Every example takes part in every step, so that nothing is random."""
    settings = {"expected_batch_size": N, "max_grad_norm": 0.5, "max_physical_batch_size": 16}
    callback = without_noise(**settings, reproducible=False, disk=DiSK(GAIN), examples=mode)
    post = PostProcessCallback([Kalman(gain=GAIN, applies_to="all")])
    run = trainer(folder, callback, post, **{"max_epochs": 5, **kwargs})
    run.fit(module, loader(), ckpt_path=ckpt_path, weights_only=True)
    return run


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_run_takes_the_steps_of_the_recursion(tmp_path, mode):
    torch.manual_seed(0)
    module = Plain(net(), lr=LR)
    expected = written_out(module.net, 5, bound=0.5)
    filtered_alone = written_out(module.net, 5, bound=0.5, length=0.0)
    fitted(tmp_path, module, mode=mode)
    # float32 over five steps.
    torch.testing.assert_close(flat(module).double(), expected, rtol=2e-4, atol=2e-5)
    assert float((filtered_alone - expected).norm()) > 1e-3


def test_an_interrupted_run_goes_on_exactly(tmp_path):
    torch.manual_seed(0)
    whole, half, again = (copy.deepcopy(module) for module in [Plain(lr=LR)] * 3)
    fitted(tmp_path / "whole", whole)
    fitted(tmp_path / "half", half, max_epochs=2).save_checkpoint(tmp_path / "half" / "two.ckpt")
    fitted(tmp_path / "half", again, ckpt_path=tmp_path / "half" / "two.ckpt")
    assert torch.equal(flat(again), flat(whole))


def released(model, clip_plan, before, x, y):
    """The clipped sum of one step that takes all examples, as a run takes it."""
    private = PrivateStep(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        TensorDataset(x, y),
        plan=PrivacyPlan(num_train=len(x), expected_batch_size=len(x), num_steps=1, noise_multiplier=0.0, delta=1e-3),
        clip_plan=clip_plan,
        disk=DiSK(GAIN),
        max_physical_batch_size=2,
    )
    private.load_state_dict(before)
    for batch in private.batches():
        private.accumulate(batch)
    private.release()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()]) * len(x)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_example_moves_the_sum_by_at_most_the_sensitivity(scale):
    """Neighbours that differ by one example."""
    model, clip_plan = net(), ClipPlan.per_layer(max_grad_norm=1.3)
    before = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    x[-1] *= scale
    after = flat(model)
    difference = released(model, clip_plan, before, x, y) - released(model, clip_plan, before, x[:-1], y[:-1])
    # The two sums are rounded to float32.
    assert float(difference.norm()) <= clip_plan.sensitivity * (1 + 1e-5) + 1e-5
    assert torch.equal(after, flat(model))


def test_parameters_are_left_at_the_step_after_an_error(tmp_path):
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                raise RuntimeError("stopped")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args):
            self.last = flat(self)

    module = Fails(lr=LR)
    with pytest.raises(ModelError, match="stopped"):
        fitted(tmp_path, module)
    assert torch.equal(flat(module), module.last)


@pytest.mark.parametrize(
    "transforms",
    [
        [Kalman(gain=0.6, applies_to="all")],
        [Kalman(gain=GAIN, applies_to="all", exclude=["net.0.*"])],
        [Momentum(0.9, applies_to="all"), Kalman(gain=GAIN, applies_to="all")],
        None,
    ],
    ids=["other gain", "without a layer", "not first", "no callback"],
)
def test_gradients_of_disk_without_its_filter_are_refused(tmp_path, transforms):
    callback = privacy(disk=DiSK(GAIN))
    others = [] if transforms is None else [PostProcessCallback(transforms)]
    with pytest.raises(ConfigurationError, match=r"Kalman with gain 0\.7 and applies_to: all"):
        trainer(tmp_path, callback, *others).fit(Plain(), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_a_gain_out_of_range_is_refused(gain):
    with pytest.raises(ConfigurationError, match=r"privacy\.disk\.gain"):
        DiSK(gain)


def test_disk_runs_in_bfloat16_and_the_statement_says_where_gradients_are_taken(tmp_path):
    class Seen(Plain):
        def training_step(self, batch, batch_idx):
            output = self.net(batch[0])
            assert output.dtype == torch.bfloat16
            return F.cross_entropy(output.float(), batch[1])

    run = fitted(tmp_path, Seen(), max_epochs=1, precision="bf16-mixed")
    assert written(run.callbacks[0])["clipping"]["gradients"] == "at DiSK's extrapolated point (gain 0.7)"
