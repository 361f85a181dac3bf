"""What a training step logs, and what it gives to metrics, is said for the whole logical batch at once."""

import os

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from plain_run import Plain, examples, loader, privacy, trainer, without_noise
from started_ranks import run_on_ranks
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper

from dp_lightning.errors import ModelError
from dp_lightning.privacy import PoissonSampler

MODES = pytest.mark.parametrize("mode", ["together", "one_by_one"])
BOTH = {"on_step": True, "on_epoch": True}


def f1():
    """No mean over batches."""
    return MulticlassF1Score(3, average="macro")


class Measured(Plain):
    """Logs numbers, and metrics as objects, as results and in collections."""

    def __init__(self):
        super().__init__()
        self.mean, self.own, self.called, self.returned = MeanMetric(), f1(), f1(), f1()
        self.scores = MetricCollection({"f1": f1(), "micro": MulticlassAccuracy(3, average="micro")})
        self.others, self.all = MetricCollection({"f1_again": f1()}), MetricCollection({"f1_so_far": f1()})
        self.by_hand = MulticlassAUROC(3, thresholds=None)  # keeps lists
        self.classes = ClasswiseWrapper(MulticlassF1Score(3, average=None), prefix="class_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, **BOTH)
        self.log_dict({"twice": 2 * loss, "constant": 2.5, "index": float(batch_idx)}, **BOTH)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.own.update(logits, y)
        self.log("own", self.own, on_step=False, on_epoch=True)
        self.called(logits, target=y)
        self.log("called", self.called, **BOTH)
        self.log("returned", self.returned(logits, y), **BOTH)
        self.scores(logits, y)
        self.log_dict(self.scores, **BOTH)
        self.log_dict(self.others(logits, y), **BOTH)
        self.log_dict(self.classes(logits, y), **BOTH)
        self.all.update(logits, y)
        self.log_dict(self.all.compute(), on_step=True)
        self.by_hand.update(logits.softmax(1), y)
        self.log("by_hand", self.by_hand.compute(), **BOTH)
        self.by_hand.reset()
        return {"loss": loss, "logits": logits}


class Shown(pl.Callback):
    """What is logged when each step has ended."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@MODES
@pytest.mark.parametrize("epochs", [1, 2])
def test_logs_and_metrics_are_those_of_all_examples_of_the_step_and_of_the_epoch(tmp_path, mode, epochs, monkeypatch):
    monkeypatch.setattr(
        PoissonSampler, "draw", lambda self, step: np.arange(20 * (step % 3), 20 * (step % 3) + 20 - step % 3)
    )
    torch.manual_seed(0)
    module, shown = Measured(), Shown()
    callback = without_noise(max_physical_batch_size=7, examples=mode, max_grad_norm=1e-9)  # the weights do not move
    run = trainer(tmp_path, callback, shown, max_epochs=epochs)
    run.fit(module, loader())
    x, y = examples().tensors
    logits, batches = module.net(x).detach(), [slice(20 * step, 19 * step + 20) for step in range(3)]
    of_steps = [float(f1()(logits[rows], y[rows])) for rows in batches]
    losses = [F.cross_entropy(logits[rows], y[rows], reduction="none") for rows in batches]
    scores = ("called", "returned", "f1", "f1_again")
    assert len(shown.steps) == 3 * epochs
    for step, found in enumerate(shown.steps):
        rows, loss = batches[step % 3], float(losses[step % 3].mean())
        expected = {"loss": loss, "twice": 2 * loss, "constant": 2.5, "index": step % 3}
        expected |= {name: of_steps[step % 3] for name in scores}
        each = MulticlassF1Score(3, average=None)(logits[rows], y[rows])
        expected |= {f"class_{place}": float(value) for place, value in enumerate(each)}
        expected |= {"by_hand": float(MulticlassAUROC(3, thresholds=None)(logits[rows].softmax(1), y[rows]))}
        expected |= {"micro": float((logits[rows].argmax(1) == y[rows]).float().mean())}
        for name, value in expected.items():
            assert found[f"{name}_step"] == pytest.approx(value, abs=1e-5), (step, name)
    found = {name.removesuffix("_epoch"): float(value) for name, value in run.callback_metrics.items()}
    every = torch.cat([torch.arange(60)[rows] for rows in batches])
    whole = {"loss": float(torch.cat(losses).mean()), "constant": 2.5, "mean": float(torch.cat(losses).mean())}
    whole |= {name: float(f1()(logits[every], y[every])) for name in ("own", "called", "f1")}
    weighted = float(np.average(of_steps, weights=[len(loss) for loss in losses]))  # as Lightning takes results
    whole |= dict.fromkeys(("returned", "f1_again"), weighted)
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    so_far = float(f1()(logits[every.repeat(2)], y[every.repeat(2)]))  # no one resets it
    assert found["f1_so_far"] == pytest.approx(so_far, abs=1e-5)
    names = {"loss", "twice", "constant", "index", "mean", "own", *scores, "micro", "f1_so_far", "by_hand"}
    names |= {f"class_{place}" for place in range(3)}
    assert set(callback.statement().unprotected) == names


@MODES
def test_empty_draws_reach_no_log_and_no_metric(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.array([], dtype=np.int64))
    module = Measured()
    run = trainer(tmp_path, privacy(examples=mode), max_epochs=1)
    run.fit(module, loader())
    assert not {"loss_step", "loss_epoch"} & run.callback_metrics.keys()
    assert not any(metric.update_called for metric in (module.mean, module.own, module.called))


@pytest.mark.parametrize("use", [lambda r: 2.0 * r, float, lambda r: r.item(), lambda r: f"{r}", lambda r: r > 0.5])
def test_what_a_metric_returns_can_be_logged_and_nothing_else(tmp_path, use):
    class Uses(Measured):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            use(self.called(logits, batch[1]))
            return F.cross_entropy(logits, batch[1])

    with pytest.raises(ModelError, match=r"self.log"):
        trainer(tmp_path, privacy(), max_epochs=1).fit(Uses(), loader())


@pytest.mark.parametrize("name", ["privacy/epsilon", "privacy/snr"])
def test_a_name_of_the_package_is_not_for_a_raw_number(tmp_path, name):
    class Named(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log(name, loss)
            return loss

    with pytest.raises(ModelError, match=f"logs '{name}', a name that is reserved"):
        trainer(tmp_path, privacy()).fit(Named(), loader())


class OnRanks(Plain):
    def __init__(self):
        super().__init__()
        self.called, self.returned, self.all = MulticlassAUROC(3, thresholds=None), f1(), f1()
        self.scores = MetricCollection({"f1": f1()})

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.called(logits, batch[1])
        self.log("called", self.called)
        self.log("returned", self.returned(logits, batch[1]))
        self.log_dict(self.scores(logits, batch[1]))
        self.all.update(logits, batch[1])
        self.log("so_far", self.all.compute())
        return F.cross_entropy(logits, batch[1])


def logged_on_a_rank(folder):
    torch.manual_seed(0)
    shown, ranks = Shown(), {"strategy": "dp_ddp", "devices": 2, "max_steps": 3}
    trainer(folder, without_noise(max_grad_norm=1e-9), shown, **ranks).fit(OnRanks(), loader())
    torch.save(shown.steps, folder / f"{os.environ['RANK']}.pt")


def test_a_rank_logs_values_of_its_own_examples_and_waits_for_no_other_that_has_none(tmp_path, monkeypatch):
    draws = [np.arange(20), np.array([5]), np.array([], dtype=np.int64)]
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: draws[step])
    ended = run_on_ranks(logged_on_a_rank, tmp_path, 2, tmp_path)
    assert not any(ended.codes), ended.stderr[-3000:]
    torch.manual_seed(0)
    module, (x, y) = OnRanks(), examples().tensors
    logits = module.net(x).detach()
    for rank in range(2):
        first, *others = torch.load(tmp_path / f"{rank}.pt")
        mine = torch.arange(20)[rank::2]
        assert first["returned"] == first["f1"] == pytest.approx(float(f1()(logits[mine], y[mine])))
        assert first["called"] == pytest.approx(float(MulticlassAUROC(3)(logits[mine], y[mine])))
        assert first["so_far"] == pytest.approx(float(f1()(logits[:20], y[:20])))  # of all ranks, as Lightning has it
        assert all((shown == first) == (rank == 1) for shown in others)  # which logs nothing any more
