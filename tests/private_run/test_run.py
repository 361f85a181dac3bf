"""A plain LightningModule on a plain Trainer trains privately, and the run is what the plan says."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from plain_run import (
    CLASSES,
    N,
    Plain,
    examples,
    flat,
    loader,
    parameters_after,
    privacy,
    trainer,
    without_noise,
    written,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.commands.verify import verify
from dp_lightning.errors import ModelError
from dp_lightning.postprocess import Momentum
from dp_lightning.privacy import ClipPlan, PoissonSampler, PrivateStep, clipped_gradient_sum
from dp_lightning.privacy.journal import journal_name
from dp_lightning.privacy.sampling import sampling_key


def test_a_plain_module_trains_and_reaches_high_accuracy(tmp_path):
    torch.manual_seed(0)
    module, data = Plain(lr=2.0), examples(600)
    callback = privacy(expected_batch_size=200, noise_multiplier=None, target_epsilon=8.0, accountant="prv")
    trainer(tmp_path, callback, max_epochs=10).fit(module, loader(data))
    x, y = examples(600, seed=1).tensors
    assert float((module.net(x).argmax(1) == y).float().mean()) > 0.85
    assert callback.ledger.num_steps == 30
    assert callback.ledger.epsilon(delta=1e-3) <= 8.0
    statement = written(callback)
    assert statement["num_steps"] == statement["num_steps_planned"] == 30
    assert statement["epsilon"]["prv"] == pytest.approx(8.0, abs=0.05)
    assert statement["sample_rate"] == 200 / 600
    assert statement["release"] == "ok"
    assert statement["unprotected"] == ["train_loss"]


@pytest.mark.parametrize("logger", [False, DummyLogger()], ids=["no logger", "a logger without a folder"])
def test_a_run_leaves_its_files_in_a_folder_of_its_own(tmp_path, monkeypatch, logger):
    monkeypatch.chdir(tmp_path)
    callback = privacy()
    module = Plain()
    for own, epochs in ((callback, 1), (callback, 2), (privacy(), 1)):  # the second fit goes on with the first run
        trainer(None, own, max_epochs=epochs, logger=logger).fit(module, loader())
        names = {path.name for path in own.private_run.folder.iterdir()}
        journal = journal_name(own.history.record.run)
        assert names == {journal, "privacy_statement.json", "privacy_statement.md"}
        assert [finding for finding in verify(tmp_path) if finding[1] is not None] == []
    assert [path.name for path in tmp_path.iterdir()] == ["privacy_runs"]
    assert sorted(path.name for path in (tmp_path / "privacy_runs").iterdir()) == ["version_0", "version_1"]


def test_a_run_with_a_log_folder_leaves_its_files_there(tmp_path):
    trainer(tmp_path, callback := privacy(), logger=CSVLogger(tmp_path, name="logs")).fit(Plain(), loader())
    assert callback.private_run.folder == tmp_path / "logs" / "version_0"
    assert written(callback)["num_steps"] == 9


def test_a_run_equals_a_hand_written_loop_over_the_same_draws(tmp_path):
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
    # The order of float32 additions differs.
    torch.testing.assert_close(found, flat(module), rtol=0, atol=1e-6)


def dropping():
    torch.manual_seed(0)
    return Plain(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES)))


def test_a_plain_loop_and_lightning_give_the_same_weights_bit_for_bit(tmp_path):
    callback = privacy(reproducible=True, max_physical_batch_size=6)
    found = parameters_after(tmp_path, callback, module=dropping())
    net = dropping().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    private = PrivateStep(
        net,
        lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        examples(),
        plan=callback.plan,
        max_physical_batch_size=6,
        seed=0,
    )
    for _ in range(9):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        optimizer.step()
    assert torch.equal(flat(net), found)
    assert private.record.ledger.runs == callback.ledger.runs


@pytest.mark.parametrize("size", [3, 1000])
def test_the_physical_batch_size_does_not_change_the_result(tmp_path, size):
    def run(size):
        saved = ModelCheckpoint(dirpath=tmp_path, filename=f"size{size}")
        callback = without_noise(max_physical_batch_size=size)
        weights = parameters_after(tmp_path, callback, saved, enable_checkpointing=True)
        return weights, torch.load(tmp_path / f"size{size}.ckpt", weights_only=True)["loops"]["fit_loop"]

    (found, counts), (expected, as_many) = run(size), run(20)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert counts == as_many


class Watch(Callback):
    """What another callback sees of gradients, wherever it stands."""

    def __init__(self):
        self.seen, self.released = [], []

    def look(self, trainer, pl_module, *args):
        self.seen += [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]

    on_train_batch_start = on_before_zero_grad = on_before_backward = on_train_batch_end = look

    def on_after_backward(self, trainer, pl_module):
        self.look(trainer, pl_module)
        self.released.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert torch.equal(torch.cat([p.grad.flatten() for p in pl_module.parameters()]), self.released[-1])


@pytest.mark.parametrize("first", [True, False])
def test_raw_gradients_never_reach_grad(tmp_path, first):
    watch, callback = Watch(), privacy(max_physical_batch_size=3, noise_multiplier=50.0)
    run = trainer(tmp_path, *((watch, callback) if first else (callback, watch)))
    run.fit(Plain(), loader())
    assert len(watch.released) == run.global_step == 9
    # sigma C / B = 2.5 per coordinate, where the clipped signal is at most 1 in all.
    assert 2.2 < float(torch.stack(watch.released).std()) < 2.8
    assert all(float(gradient.square().mean()) > 0.5 for gradient in watch.seen if gradient.numel() >= 24)


def test_the_ledger_equals_the_plan(tmp_path):
    callback = privacy(expected_batch_size=7)
    trainer(tmp_path, callback, max_epochs=2).fit(Plain(), loader())
    assert callback.plan.num_steps == 18  # round(60 / 7) in an epoch
    assert callback.ledger.runs == ((1.0, 7 / N, 18),)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_empty_draws_still_make_steps_with_noise_and_ledger_entries(tmp_path, monkeypatch, noise):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.array([], dtype=np.int64))
    watch = Watch()
    callback = privacy(noise_multiplier=noise, not_private=not noise)
    trainer(tmp_path, callback, watch).fit(Plain(), loader())
    assert callback.ledger.num_steps == len(watch.released) == 9
    # Nothing but noise: sigma C / B = 0.1 per coordinate.
    assert float(torch.stack(watch.released).std()) == pytest.approx(noise / 20, rel=0.1)


def test_a_non_finite_example_changes_nothing(tmp_path):
    data = examples()
    data.tensors[0][31] = math.nan
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


def test_two_runs_of_one_configuration_differ_and_reproducible_ones_repeat(tmp_path, monkeypatch):
    def after(seed=None, **kwargs):
        if seed is not None:
            monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # as seed_everything leaves it
        return parameters_after(tmp_path, privacy(**kwargs), module=dropping())

    assert not torch.equal(after(seed=1), after(seed=1))
    first = after(seed=1, reproducible=True)
    assert torch.equal(first, after(seed=1, reproducible=True))
    assert not torch.equal(first, after(seed=2, reproducible=True))


def test_without_noise_the_masks_of_dropout_are_still_secret(tmp_path):
    """Everyone takes part in every step, so nothing but dropout is random."""
    callback = {"expected_batch_size": N, "reproducible": False}
    first, second = (parameters_after(tmp_path, without_noise(**callback), module=dropping()) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("callback", [without_noise, lambda: privacy(reproducible=True)])
def test_a_run_without_secret_noise_says_so(tmp_path, callback):
    trainer(tmp_path, callback := callback(), max_epochs=1).fit(Plain(), loader())
    statement = written(callback)
    assert statement["reproducible"]
    assert statement["release"].startswith("not for release")
    noisy = callback.plan.noise_multiplier > 0
    assert (statement["private"], statement["epsilon"]["prv"] == "inf") == (noisy, not noisy)


def test_epsilon_is_logged_and_never_below_what_is_spent(tmp_path):
    class Shown(Callback):
        """On a weak order of steps, of which not all are milestones."""

        def on_train_batch_end(self, trainer, pl_module, *args):
            spent = callback.ledger.epsilon(delta=1e-3, accountant="rdp")
            bounds.append(callback.private_run.budget.bound - spent)

    bounds, callback = [], privacy(expected_batch_size=2)
    run = trainer(tmp_path, callback, Shown(), max_epochs=1, logger=CSVLogger(tmp_path, name="", version=""))
    run.fit(Plain(), loader())
    assert len(bounds) == 30
    assert min(bounds) >= -1e-9
    spent = callback.ledger.epsilon(delta=1e-3, accountant="rdp")
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index("privacy/epsilon")
    curve = [float(line.split(",")[place]) for line in lines[1:] if line.split(",")[place]]
    assert curve == sorted(curve)
    assert (curve[0], curve[-1]) == (0.0, pytest.approx(spent))


def test_post_processing_sees_the_privatized_gradient_and_its_state_is_saved(tmp_path):
    chain = PostProcessCallback([Momentum(0.9, applies_to="all")])
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="run")
    found = parameters_after(tmp_path, without_noise(), chain, checkpoint, enable_checkpointing=True)

    class WithMomentum(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    torch.manual_seed(0)
    expected = parameters_after(tmp_path, without_noise(), module=WithMomentum())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"]
    assert any("Momentum" in str(state) for state in saved.values())


# What one example contributes


@pytest.mark.parametrize(
    ("loss", "words", "mode"),
    [
        (lambda module: None, "no loss", "together"),
        (lambda module: module.net[0].bias.detach().sum(), "any trained parameter", "one_by_one"),
        (lambda module: module.net[0].bias, "single number", "together"),
        (lambda module: module.net[0].bias, "single number", "one_by_one"),
    ],
)
def test_a_step_without_a_loss_is_refused(tmp_path, loss, words, mode):
    class Skips(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.trainer.global_step < 4 else loss(self)

    callback = privacy(examples=mode)
    with pytest.raises(ModelError, match=words):
        trainer(tmp_path, callback).fit(Skips(), loader())
    assert callback.ledger.num_steps == 4


class OneLoudExample(Plain):
    """Only the first example has a gradient, and it is far longer than C."""

    def training_step(self, batch, batch_idx):
        loud = (batch[0][:, 0] > 50).float()
        loss = (1e4 * loud * F.cross_entropy(self.net(batch[0] / 100), batch[1], reduction="none")).mean()
        return {"loss": loss, "outputs": None}


class Saliency(OneLoudExample):
    """Takes gradients for its input, which do not count."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        for _ in range(8):
            torch.autograd.grad(super().training_step((x, batch[1]), batch_idx)["loss"], x)
        return super().training_step(batch, batch_idx)


class LeavesEpoch(OneLoudExample):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.global_step == 2 else None


class OwnBackward(OneLoudExample):
    """Of the loss that Lightning sees, from which nothing is computed."""

    def on_before_backward(self, loss):
        assert not loss.requires_grad


class Norms(Watch):
    """Norms of the sums before noise, from releases without noise."""

    @property
    def norms(self):
        return [float(gradient.norm()) * N for gradient in self.released]


@pytest.mark.parametrize(
    ("kind", "mode", "steps"),
    [
        (OneLoudExample, "together", 3),
        (OneLoudExample, "one_by_one", 3),
        (Saliency, "one_by_one", 3),
        (LeavesEpoch, "together", 2),
        (OwnBackward, "together", 3),
    ],
)
def test_one_example_contributes_exactly_its_bound(tmp_path, kind, mode, steps):
    x, y = (tensor.clone() for tensor in examples().tensors)
    x[0] = 100.0
    measured = Norms()
    callback = without_noise(expected_batch_size=N, max_physical_batch_size=7, examples=mode)
    trainer(tmp_path, callback, measured).fit(kind(), loader(TensorDataset(x, y)))
    assert measured.norms == pytest.approx([1.0] * steps, rel=1e-5)


class InterruptsOnce(Callback):
    """A Ctrl-C between two physical batches."""

    def on_train_start(self, trainer, pl_module):
        def interrupt(number, count):
            if number == 2 and trainer.global_step == 2:
                told.clear()
                raise KeyboardInterrupt

        told = trainer.callbacks[0].private_run.on_physical_batch
        told.append(interrupt)


def test_what_an_interruption_leaves_of_a_logical_batch_is_dropped(tmp_path):
    x, y = (tensor.clone() for tensor in examples().tensors)
    x[0] = 100.0
    callback, measured = without_noise(expected_batch_size=N, max_physical_batch_size=7), Norms()
    module, data = OneLoudExample(), loader(TensorDataset(x, y))
    with pytest.raises(SystemExit):
        trainer(tmp_path, callback, measured, InterruptsOnce()).fit(module, data)
    trainer(tmp_path, callback, measured).fit(module, data)
    assert callback.ledger.num_steps == 3
    assert measured.norms == pytest.approx([1.0] * 3, rel=1e-5)
