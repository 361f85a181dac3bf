"""A plain LightningModule on a plain Trainer trains privately, and the run is what the plan says."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from plain_run import (
    N,
    Plain,
    examples,
    loader,
    parameters_after,
    privacy,
    trainer,
    without_noise,
    written,
)
from torch.nn import functional as F

from dp_lightning.callbacks import AveragedWeights, PostProcessCallback
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.commands.verify import verify
from dp_lightning.errors import ModelError
from dp_lightning.postprocess import Momentum
from dp_lightning.privacy.clipping import AdaptiveClipping
from dp_lightning.privacy.journal import journal_name
from dp_lightning.privacy.schedules import Schedule


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


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        ({"clip_schedule": Schedule("linear", 0.25)}, "C 1 to 0.25 (linear), T 9"),
        ({"adaptive_clipping": AdaptiveClipping()}, "C 1, then the 0.5 quantile of norms, T 9"),
    ],
    ids=["schedule", "adaptive"],
)
def test_a_clipping_norm_that_changes_is_shown_logged_and_stated(tmp_path, capsys, rule, shown):
    class Norms(Callback):
        """C of each step, by the noise of its gradient."""

        def on_before_optimizer_step(self, *args):
            found.append(callback.private_run.step.noise_level * 20 / multiplier)

    found, callback = [], privacy(**rule)
    adaptive = callback.adaptive_clipping
    multiplier = 1.0 if adaptive is None else adaptive.noises(1.0, 20)[0]
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, callback, Norms(), logger=logger, log_every_n_steps=1).fit(Plain(), loader())
    assert shown in capsys.readouterr().out
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [float(row["privacy/max_grad_norm"]) for row in csv.DictReader(file) if row["privacy/max_grad_norm"]]
    assert len(set(found)) == (8 if adaptive is None else 9)
    assert logged == pytest.approx(found)
    statement, last = callback.statement(), callback.private_run.step.max_grad_norm
    assert statement.unprotected == ("train_loss",)
    assert statement.clipping["latest_max_grad_norm"] == last
    assert adaptive is None or f"C {last:.4g}, then" in callback.private_run.overview()
    expected = "by a schedule" if adaptive is None else "each step also releases, with noise, how many of its examples"
    assert expected in statement.to_markdown()


def test_the_physical_batch_size_does_not_change_the_result(tmp_path):
    def run(size):
        saved = ModelCheckpoint(dirpath=tmp_path, filename=f"size{size}")
        callback = without_noise(max_physical_batch_size=size)
        weights = parameters_after(tmp_path, callback, saved, enable_checkpointing=True)
        return weights, torch.load(tmp_path / f"size{size}.ckpt", weights_only=True)["loops"]["fit_loop"]

    (found, counts), (expected, as_many) = run(3), run(1000)
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


def test_raw_gradients_never_reach_grad(tmp_path):
    watch, callback = Watch(), privacy(max_physical_batch_size=3, noise_multiplier=50.0)
    run = trainer(tmp_path, watch, callback)
    run.fit(Plain(), loader())
    assert len(watch.released) == run.global_step == 9
    # sigma C / B = 2.5 per coordinate, where the clipped signal is at most 1 in all.
    assert 2.2 < float(torch.stack(watch.released).std()) < 2.8
    assert all(float(gradient.square().mean()) > 0.5 for gradient in watch.seen if gradient.numel() >= 24)


def test_two_runs_of_one_configuration_differ_and_reproducible_ones_repeat(tmp_path, monkeypatch):
    def after(seed=None, **kwargs):
        if seed is not None:
            monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # as seed_everything leaves it
        return parameters_after(tmp_path, privacy(**kwargs))

    assert not torch.equal(after(seed=1), after(seed=1))
    first = after(seed=1, reproducible=True)
    assert torch.equal(first, after(seed=1, reproducible=True))
    assert not torch.equal(first, after(seed=2, reproducible=True))


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


# What a run prints


def test_the_plan_comes_first_and_the_statement_last(tmp_path, capsys):
    private = privacy(target_epsilon=8.0, noise_multiplier=None)
    trainer(tmp_path, private, PostProcessCallback([Momentum(0.9)]), AveragedWeights(0.9)).fit(Plain(), loader())
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert list(rows) == [
        *("method", "plan", "epochs", "device"),
        *("(8,", "Unprotected", "Release:", "Results:"),
    ]
    average = "moving average of the weights (decay 0.9)"
    assert rows["method"] == f"DP-SGD by SGD; Momentum; {average}; flat clipping (abadi)"
    sigma = private.plan.noise_multiplier
    plan = f"epsilon 8 at delta 0.001 by RDP, N 60 examples, B 20, sigma {sigma:.4g}, C 1, T 9 steps"
    assert (rows["plan"], rows["epochs"]) == (plan, "3")
    assert rows["device"] == "1 x cpu, precision 32-true"
    assert rows["Results:"] == str(tmp_path / "privacy_runs" / "version_0")
    assert rows["(8,"] == "0.001)-DP by RDP, add or remove one training example, 9 of 9 steps"
    assert rows["Release:"] == "ok"


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


def one_loud():
    data = examples()
    data.tensors[0][0] = 100.0
    return data


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


class Norms(Watch):
    """Norms of the sums before noise, from releases without noise."""

    @property
    def norms(self):
        return [float(gradient.norm()) * N for gradient in self.released]


@pytest.mark.parametrize(
    ("kind", "mode", "steps"),
    [
        (OneLoudExample, "together", 3),
        (Saliency, "one_by_one", 3),
        (LeavesEpoch, "together", 2),
    ],
)
def test_one_example_contributes_exactly_its_bound(tmp_path, kind, mode, steps):
    measured = Norms()
    callback = without_noise(expected_batch_size=N, max_physical_batch_size=7, examples=mode)
    trainer(tmp_path, callback, measured).fit(kind(), loader(one_loud()))
    assert measured.norms == pytest.approx([1.0] * steps, rel=1e-5)


class Interrupts(Callback):
    """Ends the fit by Ctrl-C between two physical batches."""

    def on_train_start(self, trainer, pl_module):
        def interrupt(number, count):
            if number == 2 and trainer.global_step == 2:
                raise KeyboardInterrupt

        privacy_of(trainer).private_run.on_physical_batch.append(interrupt)


def test_what_an_interruption_leaves_of_a_logical_batch_is_dropped(tmp_path):
    callback, measured = without_noise(expected_batch_size=N, max_physical_batch_size=7), Norms()
    module, data = OneLoudExample(), loader(one_loud())
    with pytest.raises(SystemExit):
        trainer(tmp_path, callback, measured, Interrupts()).fit(module, data)
    trainer(tmp_path, callback, measured).fit(module, data)
    assert callback.ledger.num_steps == 3
    assert measured.norms == pytest.approx([1.0] * 3, rel=1e-5)
