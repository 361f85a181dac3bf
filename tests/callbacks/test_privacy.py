"""A plain LightningModule on a plain Trainer trains privately, and the run is what the plan says."""

import copy
import functools
import json
import math
import re

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PyTorchProfiler
from plain_run import CLASSES, N, Plain, examples, loader, parameters_after, privacy, trainer, without_noise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback, RunRecord, SignalToNoise
from dp_lightning.errors import BudgetError, ConfigurationError, ModelError
from dp_lightning.postprocess import Momentum
from dp_lightning.privacy import ClipPlan, PoissonSampler, clipped_gradient_sum
from dp_lightning.privacy.sampling import sampling_key
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.training_step import SealedBatch


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


def test_a_second_fit_is_refused_when_the_budget_is_spent(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    with pytest.raises(BudgetError, match="9"):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert callback.ledger.num_steps == 9


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


def test_num_train_must_be_the_data_sets(tmp_path):
    with pytest.raises(ConfigurationError, match="num_train"):
        trainer(tmp_path, privacy(num_train=100)).fit(Plain(), loader())


REFUSED_TRAINERS = {
    "gradient_clip_val": {"gradient_clip_val": 1.0},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "precision": {"precision": "bf16-true"},
    "overfit_batches": {"overfit_batches": 1},
    "detect_anomaly": {"detect_anomaly": True},
    "profiler": {"profiler": "pytorch"},
    "default_root_dir is file:/": {"default_root_dir": "file:///tmp/x"},
    "default_root_dir is memory://": {"default_root_dir": "memory://x"},
    "save_dir of CSVLogger": {"logger": CSVLogger("memory://x")},
    "fast_dev_run": {"fast_dev_run": True},
    "limit_train_batches": {"limit_train_batches": 3},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "val_check_interval": {"val_check_interval": 5},
    "max_epochs": {"max_epochs": -1},
}


@pytest.mark.parametrize("setting", REFUSED_TRAINERS)
def test_settings_that_would_break_the_guarantee_are_refused_by_name(tmp_path, setting):
    with pytest.raises(ConfigurationError, match=setting):
        trainer(tmp_path, privacy(), **REFUSED_TRAINERS[setting]).fit(Plain(), loader())


def test_checkpoints_in_a_url_are_refused(tmp_path):
    checkpoint = ModelCheckpoint(dirpath="file:///tmp/x")
    with pytest.raises(ConfigurationError, match=r"dirpath of ModelCheckpoint is .*file:/tmp/x.*Give a path"):
        trainer(tmp_path, privacy(), checkpoint, enable_checkpointing=True).fit(Plain(), loader())


@pytest.mark.parametrize("profiler", ["simple", "advanced", PyTorchProfiler(record_module_names=False)])
def test_other_profilers_change_nothing(tmp_path, profiler):
    run = trainer(tmp_path, privacy(), profiler=profiler)
    run.fit(Plain(), loader())
    assert run.global_step == 9


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 3, "max_epochs": -1}])
def test_a_batch_above_the_data_set_is_named(tmp_path, settings):
    callback = privacy(expected_batch_size=1000)
    with pytest.raises(ConfigurationError, match=r"expected_batch_size must be at most .*; got 1000\. Lower"):
        trainer(tmp_path, callback, **settings).fit(Plain(), loader())


def test_a_backward_of_ones_own_is_refused(tmp_path):
    class Scaling(Plain):
        def backward(self, loss, *args, **kwargs):
            (loss * loss.detach()).backward()

    with pytest.raises(ConfigurationError, match="Scaling has a backward of its own"):
        trainer(tmp_path, privacy()).fit(Scaling(), loader())

    class Plugin(Precision):
        def backward(self, tensor, model, optimizer, *args, **kwargs):
            (tensor * tensor.detach()).backward()

    with pytest.raises(ConfigurationError, match="Plugin has a backward of its own"):
        trainer(tmp_path, privacy(), plugins=[Plugin()]).fit(Plain(), loader())

    module = Plain()
    module.backward = lambda loss, *args, **kwargs: (loss * loss.detach()).backward()
    with pytest.raises(ConfigurationError, match="Plain has a backward of its own"):
        trainer(tmp_path, privacy()).fit(module, loader())


@pytest.mark.parametrize(
    "callback",
    [
        pl.callbacks.StochasticWeightAveraging(0.1),
        pl.callbacks.GradientAccumulationScheduler({0: 2}),
        pl.callbacks.LearningRateFinder(),
        pl.callbacks.BatchSizeFinder(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_would_break_the_guarantee_are_refused_by_name(tmp_path, callback):
    class WithLoader(Plain):
        batch_size = 7

        def train_dataloader(self):
            return loader()

    with pytest.raises(ConfigurationError, match=type(callback).__name__):
        trainer(tmp_path, privacy(), callback).fit(WithLoader())


def test_choosing_by_a_training_metric_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="monitor"):
        trainer(tmp_path, privacy(), ModelCheckpoint(monitor="train_loss"), enable_checkpointing=True).fit(
            Plain(), loader()
        )


def test_a_callback_that_would_see_gradients_first_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="PrivacyCallback first"):
        trainer(tmp_path, Watch(), privacy()).fit(Plain(), loader())


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False), nn.InstanceNorm1d(8, track_running_stats=True)],
    ids=["batch norm", "without parameters", "instance norm with running statistics"],
)
@pytest.mark.parametrize("augmult", [1, 2])
def test_statistics_of_examples_are_refused_with_the_fix(tmp_path, layer, augmult):
    class Positions(nn.Module):
        def forward(self, x):
            return x[..., None].expand(-1, -1, 2)

    net = nn.Sequential(nn.Linear(5, 8), Positions(), layer, nn.Flatten(), nn.Linear(16, CLASSES))
    with pytest.raises(ModelError, match=r"BatchNorm"):
        trainer(tmp_path, privacy(augmult=augmult)).fit(Plain(net), loader())
    assert not layer.running_mean.any()


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize("places", [1, 2])
def test_batch_norm_is_refused_with_a_fix_that_helps(tmp_path, ways, places):
    net = nn.Sequential(
        nn.Linear(5, 8),
        nn.Unflatten(1, (8 // places, places)),
        nn.BatchNorm1d(8 // places),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    with pytest.raises(ModelError, match=r"BatchNorm in training mode.*group_norm.*freeze_batch_norm") as refused:
        trainer(tmp_path, privacy(examples=ways)).fit(Plain(net), loader())
    assert "one_by_one" not in str(refused.value)


def test_statistics_of_one_example_are_allowed(tmp_path):
    net = nn.Sequential(
        nn.Linear(5, 8), nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    assert parameters_after(tmp_path, without_noise(), module=Plain(net)).isfinite().all()


@pytest.mark.parametrize("way", ["a part", "in place", "the whole"])
def test_compiled_modules_are_refused(tmp_path, way):
    module = Plain()
    if way == "a part":
        module.net[0] = torch.compile(module.net[0])
    elif way == "in place":
        module.net[0].compile()
    else:
        module.net = torch.compile(module.net)
    with pytest.raises(ModelError, match=r"compiled.*without torch.compile"):
        trainer(tmp_path, privacy()).fit(module, loader())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda module: None, "no loss"),
        (lambda module: torch.zeros(()), "any trained parameter"),
        (lambda module: module.net[0].bias.detach().sum(), "any trained parameter"),
        (lambda module: module.net[0].bias, "single number"),
    ],
)
@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_a_step_without_a_loss_is_refused(tmp_path, loss, words, examples):
    class Skips(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.trainer.global_step < 4 else loss(self)

    callback = privacy(examples=examples)
    with pytest.raises(ModelError, match=words):
        trainer(tmp_path, callback).fit(Skips(), loader())
    assert callback.ledger.num_steps == 4


def test_manual_optimization_and_two_optimizers_are_refused(tmp_path):
    class Manual(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ConfigurationError, match="automatic_optimization"):
        trainer(tmp_path, privacy()).fit(Manual(), loader())


def test_impossible_privacy_settings_are_refused():
    with pytest.raises(ConfigurationError, match="exactly one"):
        PrivacyCallback(expected_batch_size=10)
    with pytest.raises(ConfigurationError, match="exactly one"):
        PrivacyCallback(expected_batch_size=10, target_epsilon=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="not_private"):
        PrivacyCallback(expected_batch_size=10, noise_multiplier=0.0)
    with pytest.raises(ConfigurationError, match="not_private"):
        PrivacyCallback(expected_batch_size=10, noise_multiplier=1.0, not_private=True)
    with pytest.raises(ConfigurationError, match="max_physical_batch_size"):
        PrivacyCallback(expected_batch_size=10, noise_multiplier=1.0, max_physical_batch_size=0)


@pytest.mark.parametrize(("kwargs", "name"), [({"delta": 0.1}, "delta"), ({"expected_batch_size": 61}, "batch_size")])
def test_impossible_plans_are_refused_before_the_first_step(tmp_path, kwargs, name):
    with pytest.raises(ConfigurationError, match=name):
        trainer(tmp_path, privacy(**kwargs)).fit(Plain(), loader())


def test_the_result_file_names_the_best_for_what_it_is(tmp_path):
    class Evaluated(Plain):
        def validation_step(self, batch, batch_idx):
            self.log("test/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    record, meter = RunRecord(), SignalToNoise()
    run = trainer(tmp_path, privacy(), meter, record)
    run.fit(Evaluated(), loader(), DataLoader(examples(30, seed=1), batch_size=30))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["num_steps"] == 9
    assert result["completed"] is True
    assert result["evaluated_after_steps"] == [3, 6, 9]
    assert len(result["test_accuracy_curve"]) == 3
    assert (result["snr_first_epoch"], result["snr_last_epoch"]) == (meter.curve[0], meter.curve[-1])
    assert meter.curve[0] != meter.curve[-1]
    # A run that goes on has the evaluations of its first part too.
    again = RunRecord()
    again.load_state_dict(record.state_dict())
    assert again.state_dict()["curves"]["test/accuracy"] == result["test_accuracy_curve"]
    assert again.state_dict()["steps"] == [3, 6, 9]
    assert 0 <= result["test_accuracy_last"] <= result["test_accuracy_best"] <= 1
    assert "chosen on the test set" in result["test_accuracy_best_is"]
    assert result["epsilon"] > 0
    assert result["seconds"] > 0


def test_choosing_by_any_value_logged_while_training_is_refused(tmp_path):
    class Renamed(Plain):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("score", loss, on_step=True, on_epoch=True)
            return loss

    for monitor in ("score", "score_epoch"):
        stop = pl.callbacks.EarlyStopping(monitor, check_on_train_epoch_end=True)
        with pytest.raises(ConfigurationError, match=f"EarlyStopping.monitor is '{monitor}'"):
            trainer(tmp_path, privacy(), stop).fit(Renamed(), loader())


class LogsLate(Plain):
    """Logs what the examples have given when the epoch is over."""

    def on_train_epoch_end(self):
        self.log("late", 1.0)


def test_choosing_by_a_value_logged_after_the_epoch_is_refused_before_a_checkpoint_is_left(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="late", save_on_train_epoch_end=True)
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint.monitor is 'late'"):
        trainer(tmp_path, privacy(), best, max_epochs=1, enable_checkpointing=True).fit(LogsLate(), loader())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_the_statement_names_a_value_logged_after_the_last_epoch(tmp_path):
    callback = privacy()
    run = trainer(tmp_path, callback, max_epochs=1)
    run.fit(LogsLate(), loader())
    assert callback.statement().unprotected == ("late", "train_loss")
    assert json.loads((tmp_path / "privacy_statement.json").read_text())["unprotected"] == ["late", "train_loss"]


def test_a_name_logged_after_the_epoch_survives_a_resume(tmp_path):
    class Once(LogsLate):
        def on_train_epoch_end(self):
            if self.current_epoch == 0:
                super().on_train_epoch_end()

    each = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer(tmp_path, privacy(), each, max_epochs=1, enable_checkpointing=True).fit(Once(), loader())
    again = privacy()
    run = trainer(tmp_path, again, max_epochs=2)
    run.fit(Once(), loader(), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=True)
    assert again.statement().unprotected == ("late", "train_loss")


@pytest.mark.parametrize("fault", ["refused", "error", "weights"])
def test_a_run_that_ends_badly_is_not_for_release(tmp_path, fault):
    class EndsBadly(Plain):
        def training_step(self, batch, batch_idx):
            if self.global_step == 2 and fault == "refused":
                self.net(batch[0])[0, 0].item()
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2 and fault == "error":
                raise RuntimeError("of the user's own")

        def on_train_end(self):
            if fault == "weights":
                torch.nn.init.constant_(self.net[0].weight, torch.inf)

    run = trainer(tmp_path, privacy(), OnExceptionCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    said = {"refused": "a step ended by an error (ModelError)", "error": "the run ended by an error (RuntimeError)"}
    said["weights"] = "weights are not finite"
    if fault == "weights":
        run.fit(EndsBadly(), loader())
    else:
        with pytest.raises((ModelError, RuntimeError)):
            run.fit(EndsBadly(), loader())
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["private_run"]["statement"]
        assert said[fault] in PrivacyStatement.from_saved(saved).release
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["release"].startswith("not for release")
    assert said[fault] in statement["release"]


def test_a_learning_rate_by_a_training_metric_is_refused(tmp_path):
    class Plateau(Plain):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("score", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score_epoch"}}

    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.monitor"):
        trainer(tmp_path, privacy()).fit(Plateau(), loader())


def test_a_non_finite_example_does_not_stop_the_run_and_is_reported(tmp_path):
    data = examples()
    data.tensors[0][:2] = math.nan
    callback = without_noise()
    with pytest.warns(UserWarning, match=r"not finite in epoch \d: \d") as warned:
        assert parameters_after(tmp_path, callback, dataset=data).isfinite().all()
    found = [re.search(r"not finite in epoch \d: (\d)", str(warning.message)) for warning in warned]
    reported = sum(int(match[1]) for match in found if match)
    sampler = PoissonSampler(num_train=N, sample_rate=20 / N, key=sampling_key(0))
    assert reported == sum(int((sampler.draw(step) < 2).sum()) for step in range(9)) > 0
    assert "unprotected/non_finite_gradients" in callback.statement().unprotected


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_allowed_precisions_train(tmp_path, precision):
    found = parameters_after(tmp_path, without_noise(), precision=precision)
    expected = parameters_after(tmp_path, without_noise())
    # bfloat16 keeps 8 bits.
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2 if precision == "bf16-mixed" else 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x[:, None], x[:, None], x[:, None])[0][:, 0]


@pytest.mark.parametrize(
    "middle", [nn.PReLU, Attention, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]
)
def test_modules_without_a_rule_train_behind_what_autocast_makes_coarse(tmp_path, middle):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), middle(), nn.Linear(8, CLASSES))
    found = parameters_after(tmp_path, without_noise(), module=Plain(copy.deepcopy(net)), precision="bf16-mixed")
    expected = parameters_after(tmp_path, without_noise(), module=Plain(net))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_that_converts_its_inputs_to_float32_trains(tmp_path, precision):
    class Bytes(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].float() / 255), batch[1])

    x, y = examples().tensors
    data = TensorDataset((x * 50).clamp(0, 255).to(torch.uint8), y)
    assert (
        parameters_after(tmp_path, without_noise(), module=Bytes(), dataset=data, precision=precision).isfinite().all()
    )
    assert parameters_after(tmp_path, without_noise(), module=Bytes(), precision=precision).isfinite().all()


def test_a_step_that_needs_autocast_trains_with_it_alone(tmp_path):
    class Converts(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].bfloat16()), batch[1])

    found = parameters_after(tmp_path, without_noise(), module=Converts(), precision="bf16-mixed")
    expected = parameters_after(tmp_path, without_noise())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
    with pytest.raises(RuntimeError, match="same dtype"):
        parameters_after(tmp_path, without_noise(), module=Converts(), precision="32-true")


def test_a_lazy_layer_is_refused_by_name(tmp_path):
    module = Plain(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, CLASSES)))
    with pytest.raises(ModelError, match=r"'net\.0\.weight' belongs to a lazy layer"):
        trainer(tmp_path, privacy()).fit(module, loader())


def test_a_parameter_unfrozen_during_the_run_is_refused(tmp_path):
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch == 1)

    module = Plain()
    module.net[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"self.net\[0\].weight changed between two steps"):
        trainer(tmp_path, privacy(), Unfreeze()).fit(module, loader())


def test_a_sampler_of_the_users_own_is_refused(tmp_path):
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(N), N)
    with pytest.raises(ConfigurationError, match="WeightedRandomSampler"):
        trainer(tmp_path, privacy()).fit(Plain(), DataLoader(examples(), sampler=weighted, batch_size=7))


@pytest.mark.parametrize(
    "kwargs", [{}, {"shuffle": True}, {"sampler": BatchSampler(SequentialSampler(range(N)), 4, False)}]
)
def test_a_loader_that_makes_no_batches_is_refused(tmp_path, kwargs):
    dataloader = DataLoader(examples(), batch_size=None, **kwargs)
    with pytest.raises(ConfigurationError, match=r"batch_size=None.*give the loader a batch_size"):
        trainer(tmp_path, privacy()).fit(Plain(), dataloader)


def test_worker_processes_deliver_the_same_batches(tmp_path):
    torch.manual_seed(0)
    module = Plain()
    trainer(tmp_path, without_noise(max_physical_batch_size=6)).fit(
        module, loader(num_workers=2, persistent_workers=True)
    )
    found = torch.cat([p.detach().flatten() for p in module.parameters()])
    expected = parameters_after(tmp_path, without_noise(max_physical_batch_size=6))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class OneLoudExample(Plain):
    """Only the first example has a gradient, and it is far longer than C."""

    def training_step(self, batch, batch_idx):
        loud = (batch[0][:, 0] > 50).float()
        return (1e4 * loud * F.cross_entropy(self.net(batch[0] / 100), batch[1], reduction="none")).mean()


def loud_examples():
    x, y = examples().tensors
    x = x.clone()
    x[0] = 100.0
    return TensorDataset(x, y)


class MeasuredRelease(Callback):
    """Norms of the sums before noise, from releases without noise."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        total = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
        self.norms.append(float(total.norm()) * N)


def everyone(**kwargs):
    return without_noise(expected_batch_size=N, **kwargs)


def norms_of_releases(tmp_path, module, size, examples="together", **kwargs):
    measured = MeasuredRelease()
    callback = everyone(max_physical_batch_size=size, examples=examples)
    trainer(tmp_path, callback, measured, **kwargs).fit(module, loader(loud_examples()))
    return measured.norms


def test_one_example_contributes_exactly_its_bound(tmp_path):
    assert norms_of_releases(tmp_path, OneLoudExample(), 7) == pytest.approx([1.0] * 3, rel=1e-5)


def test_an_abandoned_logical_batch_is_dropped(tmp_path):
    class LeavesEpoch(OneLoudExample):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.trainer.current_epoch < 2 and batch_idx == 3 else None

    norms = norms_of_releases(tmp_path, LeavesEpoch(), 7, max_epochs=4)
    assert norms == pytest.approx([1.0] * len(norms), rel=1e-5)
    assert norms


@pytest.mark.parametrize("of", ["module", "callback"])
def test_outputs_of_the_training_step_are_refused_by_name(tmp_path, of):
    class Returns(Plain):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "preds": self.net(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert float(outputs["loss"]) == 0
            assert of == "callback" or outputs["preds"] is None

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert of == "module" or outputs["preds"] is None

    run = trainer(tmp_path, privacy(), Reads())
    with pytest.raises(ModelError, match=r"'preds'.*self\.log"):
        run.fit(Returns(), loader())
    assert "output_result_cls" not in vars(run.fit_loop.epoch_loop.automatic_optimization)


def test_hooks_of_the_module_are_called_once_for_each_logical_step_with_its_number(tmp_path):
    seen, pieces = [], []

    class Pieces(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            pieces.append(batch_idx)

    class Steps(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(("start", batch_idx))

        def on_before_backward(self, loss):
            self.backward_passes = getattr(self, "backward_passes", 0) + 1

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.param_groups[0]["lr"] = 0.1 * (batch_idx + 1)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            seen.append(("optimizer", batch_idx))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(("end", batch_idx))

    module = Steps()
    trainer(tmp_path, privacy(max_physical_batch_size=4), Pieces(), max_epochs=2).fit(module, loader())
    assert seen == [(name, step % 3) for step in range(6) for name in ("start", "optimizer", "end")]
    assert module.backward_passes == 6
    assert len(pieces) > 6
    assert not {"optimizer_step", "on_train_batch_start", "on_before_backward"} & set(vars(module))


def test_what_a_callback_counts_in_the_module_is_refused(tmp_path):
    class Counts(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.count = getattr(module, "count", 0) + 1

    with pytest.raises(ModelError, match=r"self\.count changed between two physical batches of one step"):
        trainer(tmp_path, privacy(max_physical_batch_size=4), Counts(), max_epochs=2).fit(Plain(), loader())


def test_a_skipped_optimizer_step_is_refused(tmp_path):
    class Skips(Plain):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    with pytest.raises(ModelError, match=r"without an optimizer step|without a complete"):
        trainer(tmp_path, privacy()).fit(Skips(), loader())


@pytest.mark.parametrize("size", [20, 100])
def test_gradients_taken_inside_training_step_do_not_count(tmp_path, size):
    class Saliency(OneLoudExample):
        def training_step(self, batch, batch_idx):
            x = batch[0].clone().requires_grad_()
            for _ in range(8):
                torch.autograd.grad(super().training_step((x, batch[1]), batch_idx), x)
            return super().training_step(batch, batch_idx)

    norms = norms_of_releases(tmp_path, Saliency(), size, examples="one_by_one")
    assert norms == pytest.approx([1.0] * 3, rel=1e-5)
    with pytest.raises(ModelError, match="one_by_one"):
        norms_of_releases(tmp_path, Saliency(), size)


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_backward_passes_of_hooks_do_not_count(tmp_path, examples):
    """They see a loss of zero."""

    class Twice(OneLoudExample):
        def on_before_backward(self, loss):
            loss.backward(retain_graph=True)
            (3 * loss).backward(retain_graph=True)

    assert norms_of_releases(tmp_path, Twice(), 7, examples=examples) == pytest.approx([1.0] * 3, rel=1e-5)


class Refused(Plain):
    """Takes a second gradient of its own in training_step."""

    def __init__(self, inside):
        super().__init__()
        self.__dict__["inside"] = inside

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.inside(self, loss)
        return loss


SECOND = {
    "backward": lambda module, loss: loss.backward(retain_graph=True),
    "autograd.grad": lambda module, loss: torch.autograd.grad(loss, module.net[0].weight, retain_graph=True),
    "tensor hook": lambda module, loss: loss.register_hook(lambda gradient: 2 * gradient),
    "module hook": lambda module, loss: module.net[0].register_full_backward_hook(lambda *args: None),
}


@pytest.mark.parametrize("inside", SECOND.values(), ids=SECOND)
def test_a_second_backward_pass_and_hooks_inside_of_the_step_are_refused(tmp_path, inside):
    callback = privacy()
    with pytest.raises(ModelError, match=r"one_by_one|training_step changes"):
        trainer(tmp_path, callback).fit(Refused(inside), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("kind", ["frozen parameter", "buffer"])
def test_a_tensor_that_the_forward_pass_writes_is_refused_by_name(tmp_path, start, kind, examples):
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            centre = torch.zeros(5)
            if kind == "buffer":
                self.register_buffer("centre", centre)
            else:
                self.centre = nn.Parameter(centre, requires_grad=False)
            self.on = False

        def forward(self, x):
            if self.on:
                with torch.no_grad():
                    self.centre.copy_(x.detach().mean(0))
            return x

    class Switch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.net[0].on = trainer.global_step >= start

    module, callback = Plain(nn.Sequential(Centre(), nn.Linear(5, CLASSES))), privacy(examples=examples)
    with pytest.raises(ModelError, match=r"centre|all examples share"):
        trainer(tmp_path, callback, Switch()).fit(module, loader())
    assert callback.ledger.num_steps == start
    if examples == "together":
        assert not module.net[0].centre.any()


def test_what_is_kept_of_earlier_examples_is_refused(tmp_path):
    kept = []

    class Slow(Plain):
        def training_step(self, batch, batch_idx):
            own = F.cross_entropy(self.net(batch[0]), batch[1])
            kept.append(own.detach() if not kept else 0.999 * kept[-1] + 0.001 * own.detach())
            return own / kept[-1]

    for ways in ("together", "one_by_one"):
        kept.clear()
        with pytest.raises(ModelError, match=r"training_step (keeps|changes|uses a tensor)"):
            trainer(tmp_path, privacy(examples=ways)).fit(Slow(), loader())


def test_the_shown_epsilon_is_never_below_what_is_spent(tmp_path):
    class Shown(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            callback = trainer.callbacks[0]
            shown.append(callback.budget.bound - callback.ledger.epsilon(delta=1e-3, accountant="rdp"))

    shown = []
    trainer(tmp_path, privacy(expected_batch_size=2), Shown(), max_epochs=1).fit(Plain(), loader())
    assert len(shown) >= 30
    assert min(shown) >= -1e-9


def test_a_refused_fit_leaves_no_statement(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    (tmp_path / "privacy_statement.json").unlink()
    with pytest.raises(BudgetError):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert not (tmp_path / "privacy_statement.json").exists()


def test_a_training_step_that_is_an_attribute_is_the_modules_again_after_the_fit(tmp_path):
    module = Plain()
    own = module.training_step = functools.partial(Plain.training_step, module)
    trainer(tmp_path, privacy(), max_epochs=1).fit(module, loader())
    assert module.training_step is own
