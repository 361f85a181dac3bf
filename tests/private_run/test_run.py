"""A plain LightningModule on a plain Trainer trains privately, and the run is what the plan says."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from dp_lightning.private_run.training_step import SealedBatch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from plain_run import CLASSES, N, Plain, examples, loader, parameters_after, privacy, trainer, without_noise
from torch import nn
from torch.nn import functional as F

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.postprocess import Momentum
from dp_lightning.privacy import ClipPlan, PoissonSampler, clipped_gradient_sum
from dp_lightning.privacy.sampling import sampling_key


def test_a_plain_module_trains_and_reaches_high_accuracy(tmp_path):
    torch.manual_seed(0)
    module, data = Plain(lr=2.0), examples(600)
    callback = privacy(expected_batch_size=200, noise_multiplier=None, target_epsilon=8.0, accountant="prv")
    trainer(tmp_path, callback, max_epochs=20).fit(module, loader(data))
    x, y = examples(600, seed=1).tensors
    assert float((module.net(x).argmax(1) == y).float().mean()) > 0.85
    assert callback.ledger.num_steps == 60
    assert callback.ledger.epsilon(delta=1e-3) <= 8.0
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["num_steps"] == statement["num_steps_planned"] == 60
    assert statement["epsilon"]["prv"] == pytest.approx(8.0, abs=0.05)
    assert statement["sample_rate"] == 200 / 600
    assert statement["release"] == "ok"
    assert statement["unprotected"] == ["train_loss"]
    assert (tmp_path / "privacy_statement.md").exists()


def test_one_run_equals_a_hand_written_loop_over_the_same_draws(tmp_path):
    found = parameters_after(tmp_path, without_noise(max_physical_batch_size=6))
    torch.manual_seed(0)
    module, (x, y) = Plain(), examples().tensors
    sampler = PoissonSampler(num_train=N, sample_rate=20 / N, key=sampling_key(0))
    for step in range(9):
        rows = torch.from_numpy(sampler.draw(step))
        sums, _ = clipped_gradient_sum(
            module.net, F.cross_entropy, x[rows], y[rows], clip_plan=ClipPlan.flat(max_grad_norm=1.0)
        )
        with torch.no_grad():
            for name, p in module.net.named_parameters():
                p -= 0.5 * sums[name] / 20
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    # The order of float32 additions differs.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
def test_the_physical_batch_size_does_not_change_the_result(tmp_path, size):
    expected = parameters_after(tmp_path, without_noise(max_physical_batch_size=20))
    found = parameters_after(tmp_path, without_noise(max_physical_batch_size=size))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Watch(Callback):
    """What another callback sees."""

    def __init__(self):
        self.raw, self.privatized, self.global_steps, self.rates, self.seen = [], [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert isinstance(batch, SealedBatch)

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen.append(loss)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"])

    def on_after_backward(self, trainer, pl_module):
        self.raw += [p.grad for p in pl_module.parameters() if p.grad is not None]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.privatized.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.global_steps.append(trainer.global_step)


def test_raw_gradients_never_reach_grad_and_counters_count_logical_steps(tmp_path):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    watch = Watch()
    callback = privacy(max_physical_batch_size=3, noise_multiplier=50.0)
    run = trainer(tmp_path, callback, watch)
    run.fit(Scheduled(), loader())
    # The loss that Lightning and its callbacks see says nothing.
    assert len(watch.seen) > 2 * 9
    assert all(float(loss) == 0 for loss in watch.seen)
    # Only an earlier step's privatized gradient may still stand there.
    assert all(float(gradient.norm()) > 1.0 for gradient in watch.raw if gradient.numel() > 10)
    assert watch.global_steps == list(range(9))
    assert watch.rates == pytest.approx([1.0 / (step + 1) for step in range(9)])
    assert run.global_step == 9
    assert callback.ledger.num_steps == 9
    # sigma C / B = 2.5 per coordinate, where the clipped signal is at most 1 in all.
    spread = torch.stack(watch.privatized).std()
    assert 2.2 < float(spread) < 2.8


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_ledger_equals_the_plan(tmp_path, epochs):
    callback = privacy(expected_batch_size=7)
    trainer(tmp_path, callback, max_epochs=epochs).fit(Plain(), loader())
    assert callback.plan is not None
    assert callback.plan.num_steps == epochs * N // 7
    assert callback.ledger.runs == ((1.0, 7 / N, epochs * N // 7),)


def test_max_steps_bounds_the_plan_and_cuts_the_last_epoch(tmp_path):
    callback = privacy()
    run = trainer(tmp_path, callback, max_epochs=None, max_steps=5)
    run.fit(Plain(), loader())
    assert callback.plan.num_steps == run.global_step == callback.ledger.num_steps == 5


def test_empty_draws_still_make_steps_with_noise_and_ledger_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.array([], dtype=np.int64))
    watch = Watch()
    callback = privacy(noise_multiplier=2.0)
    before = Plain()
    trainer(tmp_path, callback, watch).fit(before, loader())
    assert callback.ledger.num_steps == 9
    assert len(watch.privatized) == 9
    # Nothing but noise: sigma C / B = 0.1 per coordinate.
    assert float(torch.stack(watch.privatized).std()) == pytest.approx(0.1, rel=0.1)


def test_empty_draws_without_noise_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.array([], dtype=np.int64))
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in Plain().parameters()])
    assert torch.equal(parameters_after(tmp_path, without_noise()), start)


def test_a_rare_example_set_takes_every_step(tmp_path):
    callback = privacy(expected_batch_size=1)
    trainer(tmp_path, callback, max_epochs=1).fit(Plain(), loader())
    assert callback.ledger.num_steps == N


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_example_changes_nothing(tmp_path, value):
    data = examples()
    data.tensors[0][31] = value
    found = parameters_after(tmp_path, without_noise(max_physical_batch_size=5), dataset=data)

    class Without(PoissonSampler):
        def draw(self, step):
            rows = super().draw(step)
            return rows[rows != 31]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dp_lightning.privacy.step.PoissonSampler", Without)
        expected = parameters_after(tmp_path, without_noise(max_physical_batch_size=5))
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_overwhelming_noise_learns_nothing(tmp_path):
    torch.manual_seed(0)
    x, y = examples(600, seed=1).tensors
    accuracies = []
    for _ in range(5):
        module = Plain(lr=2.0)
        trainer(tmp_path, privacy(expected_batch_size=200, noise_multiplier=1000.0), max_epochs=5).fit(
            module, loader(examples(600))
        )
        accuracies.append(float((module.net(x).argmax(1) == y).float().mean()))
    # Chance is 1/3; a random linear map of separable classes may still match some of them.
    assert np.mean(accuracies) < 0.6


def test_two_runs_of_one_configuration_differ_and_reproducible_ones_repeat(tmp_path, monkeypatch):
    def dropping():
        torch.manual_seed(0)
        return Plain(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES)))

    def after(seed=None, **kwargs):
        if seed is not None:
            monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # as seed_everything leaves it
        return parameters_after(tmp_path, privacy(**kwargs), module=dropping())

    assert not torch.equal(after(seed=1), after(seed=1))
    first = after(seed=1, reproducible=True)
    assert torch.equal(first, after(seed=1, reproducible=True))
    assert not torch.equal(first, after(seed=2, reproducible=True))
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["reproducible"]
    assert statement["release"].startswith("not for release")


def test_without_noise_the_masks_of_dropout_are_still_secret(tmp_path):
    """Everyone takes part in every step, so nothing but dropout is random."""
    callback = {"expected_batch_size": N, "reproducible": False}
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES))
    first, second = (
        parameters_after(tmp_path, without_noise(**callback), module=Plain(copy.deepcopy(net))) for _ in range(2)
    )
    assert not torch.equal(first, second)


def test_a_run_without_noise_says_so(tmp_path):
    parameters_after(tmp_path, without_noise())
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["epsilon"]["prv"] == "inf"
    assert not statement["private"]


def test_post_processing_sees_the_privatized_gradient_and_its_state_is_saved(tmp_path):
    torch.manual_seed(0)
    chain = PostProcessCallback([Momentum(0.9, applies_to="all")])
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="run")
    run = trainer(tmp_path, without_noise(), chain, checkpoint, enable_checkpointing=True)
    module = Plain()
    run.fit(module, loader())
    found = torch.cat([p.detach().flatten() for p in module.parameters()])

    class WithMomentum(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    torch.manual_seed(0)
    expected = parameters_after(tmp_path, without_noise(), module=WithMomentum())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]
    assert any("Momentum" in str(state) for state in saved.values())


def test_a_checkpoint_does_not_count_physical_batches(tmp_path):
    def progress(size):
        checkpoint = ModelCheckpoint(dirpath=tmp_path, filename=f"size{size}")
        callback = without_noise(max_physical_batch_size=size)
        parameters_after(tmp_path, callback, checkpoint, enable_checkpointing=True)
        return torch.load(tmp_path / f"size{size}.ckpt", weights_only=True)["loops"]["fit_loop"]

    assert progress(2) == progress(100)
