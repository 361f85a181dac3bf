"""What a training step logs, and what it gives to metrics, is said for the whole physical batch at once."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from plain_run import Plain, examples, loader, logged_in_the_fit, physical_batch, privacy, trainer
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from dp_lightning.errors import ModelError
from dp_lightning.privacy import PoissonSampler

MODES = pytest.mark.parametrize("mode", ["together", "one_by_one"])


class Measured(Plain):
    """Counts what its metrics have seen."""

    def __init__(self):
        super().__init__()
        self.mean, self.accuracy = MeanMetric(), MulticlassAccuracy(3, average="micro")
        self.scores = MetricCollection({"f1": MulticlassF1Score(3), "micro": MulticlassAccuracy(3, average="micro")})

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("constant", 2.5, on_step=False, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("result", self.accuracy(logits, y), on_step=False, on_epoch=True)
        self.scores.update(logits, y)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log_dict({"both": loss, "twice": 2 * loss}, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits}


def logged(tmp_path, module, mode, **kwargs):
    torch.manual_seed(0)
    callback = privacy(max_physical_batch_size=7, reproducible=True, examples=mode, **kwargs)
    run = trainer(tmp_path, callback, max_epochs=1, **{"log_every_n_steps": 1})
    run.fit(module, loader())
    return {name: float(value) for name, value in run.callback_metrics.items()}, callback


@MODES
def test_several_numbers_of_a_metric_are_no_single_one(tmp_path, mode):
    class OfEachClass(Plain):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average=None)

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.log("each", self.accuracy(logits, batch[1]))
            return F.cross_entropy(logits, batch[1])

    with pytest.raises(ModelError, match=r"takes a single number; 'each' has the shape \(3,\)"):
        logged(tmp_path, OfEachClass(), mode)


def test_what_fills_a_batch_changes_no_log_and_no_metric(tmp_path):
    found = []
    for filled in (False, True):
        torch.manual_seed(0)
        module = Measured()
        found.append(logged(tmp_path, module, "together", constant_shapes=filled)[0])
        found[-1]["weights"] = float(sum(p.detach().double().square().sum() for p in module.parameters()))
    assert found[1].keys() == found[0].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=1e-5), name


@MODES
def test_logs_and_metrics_are_those_of_all_examples(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.arange(step, 60, 3))
    torch.manual_seed(0)
    module = Measured()
    found, callback = logged(tmp_path, module, mode, noise_multiplier=0.0, not_private=True, max_grad_norm=1e-9)
    x, y = examples().tensors  # the weights have not moved
    logits = module.net(x).detach()
    accuracy = float((logits.argmax(1) == y).float().mean())
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-5)
    assert found["mean"] == pytest.approx(found["loss"], abs=1e-5)
    assert found["both"] == pytest.approx(found["loss"], abs=1e-5)
    assert found["twice"] == pytest.approx(2 * found["loss"], abs=1e-5)
    for name in ("accuracy", "micro", "result"):
        assert found[name] == pytest.approx(accuracy, abs=1e-6)
    assert found["f1"] == pytest.approx(float(MulticlassF1Score(3)(logits, y)), abs=1e-6)
    assert found["constant"] == 2.5
    unprotected = {"accuracy", "both", "constant", "f1", "loss", "mean", "micro", "result", "twice"}
    assert set(callback.statement().unprotected) == unprotected


@MODES
def test_a_metric_has_the_value_of_the_whole_physical_batch_on_the_step(tmp_path, mode):
    found = []

    class Logs(Plain):
        def __init__(self):
            super().__init__()
            self.f1, self.mean = MulticlassF1Score(3), MeanMetric()
            self.scores = MetricCollection({"again": MulticlassF1Score(3), "micro": MulticlassAccuracy(3)})

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.f1(logits, target=batch[1])
            self.log("f1", self.f1, on_step=True, on_epoch=True)
            self.mean(logits.sum())
            self.log("mean", self.mean)
            self.scores(logits, batch[1])
            self.log_dict(self.scores, on_step=True, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    class Compares(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            batch = physical_batch(trainer)
            x, y = (part.flatten(0, 1)[batch.counted] for part in batch.examples)
            self.logits, self.y = module.net(x).detach(), y

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if len(self.y) == 0:
                return
            shown, f1 = logged_in_the_fit(trainer), MulticlassF1Score(3)(self.logits, self.y)
            assert float(shown["f1_step"]) == pytest.approx(float(f1), abs=1e-6)
            assert float(shown["again_step"]) == pytest.approx(float(f1), abs=1e-6)
            assert float(shown["mean"]) == pytest.approx(float(self.logits.sum(1).mean()), abs=1e-5)
            found.append((self.logits, self.y))

    torch.manual_seed(0)
    callback = privacy(max_physical_batch_size=7, examples=mode)
    run = trainer(tmp_path, callback, Compares(), max_epochs=1)
    run.fit(Logs(), loader())
    assert len(found) > 3
    logits, y = (torch.cat(parts) for parts in zip(*found, strict=True))
    for name in ("f1", "again"):
        assert float(run.callback_metrics[f"{name}_epoch"]) == pytest.approx(float(MulticlassF1Score(3)(logits, y)))


@MODES
def test_empty_draws_reach_no_log_and_no_metric(tmp_path, mode, monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.array([], dtype=np.int64))

    class Counted(Plain):
        def __init__(self):
            super().__init__()
            self.seen = MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.seen.update(loss)
            self.log("loss", loss)
            return loss

    module = Counted()
    found, _ = logged(tmp_path, module, mode)
    assert "loss" not in found
    assert not module.seen.update_called


@MODES
@pytest.mark.parametrize(
    "use", [lambda r: r + 1, lambda r: 2.0 * r, float, bool, lambda r: r.item(), lambda r: f"{r}", lambda r: r > 0.5]
)
def test_what_a_metric_returns_can_be_logged_and_nothing_else(tmp_path, mode, use):
    class Uses(Measured):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            use(self.accuracy(logits, batch[1]))
            return F.cross_entropy(logits, batch[1])

    with pytest.raises(ModelError, match=r"self.log"):
        logged(tmp_path, Uses(), mode)


@MODES
def test_metrics_keep_their_own_methods(tmp_path, mode):
    module = Measured()
    before = {name: set(vars(part)) for name, part in module.named_modules()}
    logged(tmp_path, module, mode)
    for name, part in module.named_modules():
        assert not {"forward", "reset"} & set(vars(part)) - before[name]
    assert "log" not in vars(module)
    assert "training_step" not in vars(module)
    module.accuracy.reset()
    assert float(module.accuracy(torch.eye(3), torch.arange(3))) == 1.0


@MODES
def test_a_physical_batch_says_the_mean_of_its_examples_and_sees_the_logical_index(tmp_path, mode):
    seen, counts = [], []

    class Says(Plain):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx))
            self.log("x", batch[0].sum(), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            counts.append(int(physical_batch(trainer).counted.sum()))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            shown, batch = logged_in_the_fit(trainer), physical_batch(trainer)
            x = batch.examples[0][batch.counted].sum() / max(counts[-1], 1)
            assert not counts[-1] or float(shown["x_step"]) == pytest.approx(float(x), rel=1e-5)
            seen.append((batch.place.step, int(shown["index"])))

    run = trainer(tmp_path, privacy(max_physical_batch_size=4, examples=mode), Looks(), max_epochs=2)
    run.fit(Says(), loader())
    # Three steps in an epoch, whatever the number of physical batches is.
    assert sorted(set(seen)) == [(step, step % 3) for step in range(6)]
    assert len(seen) > 12
