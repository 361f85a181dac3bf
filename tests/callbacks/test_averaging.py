"""The moving average of the weights: against its recursion, evaluated beside the weights, kept in checkpoints."""

import copy
import json

import lightning.pytorch as pl
import pytest
import torch
from plain_run import CLASSES, Plain, examples, loader, privacy, trainer
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from dp_lightning.callbacks import AveragedWeights, PrivacyCallback
from dp_lightning.errors import ConfigurationError


class Watched(Plain):
    """Evaluates with a metric of its own and with plain numbers, and has a frozen layer and a buffer."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
        self.net[0].bias.requires_grad_(False)
        self.register_buffer("offset", torch.zeros(CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({name: p.detach().clone() for name, p in self.named_parameters() if p.requires_grad})

    def evaluate(self, batch, name):
        logits = self.net(batch[0]) + self.offset
        self.accuracy.update(logits, batch[1])
        self.log_dict({f"{name}/accuracy": self.accuracy, f"{name}/loss": F.cross_entropy(logits, batch[1])})

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch):
        self.evaluate(batch, "test")

    def on_validation_epoch_end(self):
        self.log("val/weight", self.net[2].weight.sum())

    def predict_step(self, batch):
        return self.net(batch[0]).softmax(1)


def run(folder, averaging, module=None, *, callback=None, ckpt_path=None, **kwargs):
    torch.manual_seed(0)
    module = module or Watched()
    used = trainer(folder, callback or privacy(reproducible=True), averaging, **kwargs)
    used.fit(module, loader(), loader(examples(30, seed=4)), ckpt_path=ckpt_path)
    return used, module


def by_recursion(start, steps, decay):
    average = {name: value.double() for name, value in start.items()}
    for t, weights in enumerate(steps):
        d = min(decay, (1 + t) / (10 + t))
        average = {name: d * value + (1 - d) * weights[name].double() for name, value in average.items()}
    return average


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.99])
def test_the_average_follows_its_recursion(tmp_path, decay):
    torch.manual_seed(0)
    module = Watched()
    start = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    averaging, callback = AveragedWeights(decay), privacy(max_physical_batch_size=3)
    run(tmp_path, averaging, module, callback=callback)
    assert averaging.state_dict().get("num_updates") == callback.ledger.num_steps == len(module.seen) == 9
    expected = by_recursion(start, module.seen, decay)
    assert set(averaging.average) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(averaging.average[name].double(), value, rtol=1e-6, atol=1e-7)


def test_evaluations_tell_of_both(tmp_path):
    averaging = AveragedWeights(0.9)
    used, module = run(tmp_path, averaging)
    shown = {name: float(value) for name, value in used.callback_metrics.items()}
    for weights, prefix in ((dict(module.named_parameters()), ""), (averaging.average, "averaged/")):
        alone = copy.deepcopy(module)
        alone.load_state_dict({**module.state_dict(), **weights})
        x, y = examples(30, seed=4).tensors
        logits = alone.net(x)
        assert shown[f"{prefix}val/accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
        assert shown[f"{prefix}val/loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
        assert shown[f"{prefix}val/weight"] == pytest.approx(float(alone.net[2].weight.sum()), rel=1e-5)
    assert shown["averaged/val/loss"] != pytest.approx(shown["val/loss"], rel=1e-4)
    tested = used.test(module, loader(examples(30, seed=4)), verbose=False)[0]
    assert tested["averaged/test/loss"] == pytest.approx(shown["averaged/val/loss"], rel=1e-5)
    assert tested["test/accuracy"] == pytest.approx(shown["val/accuracy"])


def test_training_does_not_change(tmp_path):
    ends = []
    for averaging in (AveragedWeights(0.9), AveragedWeights()):
        _, module = run(tmp_path, averaging)
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*ends)


def test_a_run_that_goes_on_keeps_its_average(tmp_path):
    whole, cut = AveragedWeights(0.9), AveragedWeights(0.9)
    run(tmp_path, whole, max_epochs=4)
    used, _ = run(tmp_path, cut, max_epochs=2)
    used.save_checkpoint(tmp_path / "two.ckpt")
    again = AveragedWeights(0.9)
    went_on, _ = run(tmp_path, again, ckpt_path=tmp_path / "two.ckpt", max_epochs=4)
    assert again.state_dict()["num_updates"] == whole.state_dict()["num_updates"] == went_on.global_step
    for name, value in whole.average.items():
        assert torch.equal(again.average[name], value)


def test_a_checkpoint_is_tested_and_predicted_from_its_average(tmp_path):
    averaging = AveragedWeights(0.9)
    used, module = run(tmp_path, averaging)
    used.save_checkpoint(tmp_path / "end.ckpt")
    metrics = {name: float(value) for name, value in used.callback_metrics.items()}
    images = loader(examples(30, seed=4))

    def fresh(**kwargs):
        return trainer(tmp_path, privacy(), AveragedWeights(0.9, **kwargs))

    tested = fresh().test(Watched(), images, ckpt_path=tmp_path / "end.ckpt", weights_only=True, verbose=False)[0]
    assert tested["averaged/test/loss"] == pytest.approx(metrics["averaged/val/loss"], rel=1e-5)
    assert tested["test/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
    x = next(iter(torch.utils.data.DataLoader(examples(30, seed=4), batch_size=30)))[0]
    for choice, weights in (("raw", {}), ("averaged", averaging.average)):
        alone = copy.deepcopy(module)
        alone.load_state_dict({**module.state_dict(), **weights})
        plain = torch.utils.data.DataLoader(examples(30, seed=4), batch_size=30)
        (predicted,) = fresh(predict_with=choice).predict(
            Watched(), plain, ckpt_path=tmp_path / "end.ckpt", weights_only=True
        )
        torch.testing.assert_close(predicted, alone.net(x).softmax(1))
    with pytest.raises(ConfigurationError, match=r"no average of the weights.*predict_with: raw"):
        fresh().predict(Watched(), images)


def test_an_average_that_starts_late_starts_at_the_checkpoint(tmp_path):
    used, module = run(tmp_path, AveragedWeights(), max_epochs=2)
    used.save_checkpoint(tmp_path / "two.ckpt")
    start = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    late = AveragedWeights(0.9)
    _, other = run(tmp_path, late, ckpt_path=tmp_path / "two.ckpt", max_epochs=3)
    expected = by_recursion(start, other.seen, 0.9)
    for name, value in expected.items():
        torch.testing.assert_close(late.average[name].double(), value, rtol=1e-6, atol=1e-7)


def test_the_statement_names_the_average(tmp_path):
    run(tmp_path, AveragedWeights(0.95))
    (statement,) = tmp_path.rglob("privacy_statement.json")
    assert "moving average of the weights (decay 0.95" in json.loads(statement.read_text())["postprocessing"]


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match=r"averaging\.decay is"):
        AveragedWeights(decay)


def test_a_module_that_cannot_be_copied_takes_no_step(tmp_path):
    class Locked(Plain):
        def __deepcopy__(self, memo):
            raise TypeError("holds a lock")

    callback = privacy()
    with pytest.raises(TypeError, match="holds a lock"):
        trainer(tmp_path, callback, AveragedWeights(0.9)).fit(Locked(), loader())
    assert callback.ledger.num_steps == 0


class Elaborate(Watched):
    """Makes attributes and buffers on the way, logs in hooks, and has dropout."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))

    def setup(self, stage):
        self.scale = 1.0
        self.register_buffer("made", torch.ones(3))

    def on_train_start(self):
        self.scale = 5.0

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.offset = self.offset.clone() + 0.01

    def on_validation_start(self):
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.outputs.append(len(batch[1]))
        self.log("val/scale", self.scale * self.made.sum())

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log("val/rows", float(len(batch[1])))

    def on_validation_epoch_end(self):
        self.log("val/outputs", float(sum(self.outputs)))


def test_modules_that_change_on_the_way_are_evaluated_as_they_are(tmp_path):
    averaging = AveragedWeights(0.9)
    used, module = run(tmp_path, averaging, Elaborate())
    shown = {name: float(value) for name, value in used.callback_metrics.items()}
    for name in ("val/scale", "val/rows", "val/outputs"):
        assert shown[f"averaged/{name}"] == shown[name]
    assert shown["val/scale"] == 15.0
    assert shown["val/outputs"] == 30.0
    alone = copy.deepcopy(module).eval()
    alone.load_state_dict({**module.state_dict(), **averaging.average})
    x, y = examples(30, seed=4).tensors
    expected = F.cross_entropy(alone.net(x) + module.offset, y)
    assert shown["averaged/val/loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_predictions_leave_the_weights_as_they_were(tmp_path):
    averaging = AveragedWeights(0.9)
    used, module = run(tmp_path, averaging)
    before = copy.deepcopy(module.state_dict())
    used.predict(module, loader(examples(30, seed=4)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    class Breaks(Watched):
        def predict_step(self, batch):
            raise RuntimeError("broken")

    other = Breaks()
    other.load_state_dict(before)
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, averaging).predict(other, loader())
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_run_may_go_on_without_its_average(tmp_path):
    used, _ = run(tmp_path, AveragedWeights(0.9), max_epochs=2)
    used.save_checkpoint(tmp_path / "two.ckpt")
    off = AveragedWeights()
    again, _ = run(tmp_path, off, ckpt_path=tmp_path / "two.ckpt", max_epochs=3)
    assert again.global_step == 9
    assert off.state_dict() == {}
    with pytest.warns(UserWarning, match="The checkpoint has an average of the weights"):
        trainer(tmp_path, privacy(), AveragedWeights()).predict(
            Watched(), loader(), ckpt_path=tmp_path / "two.ckpt", weights_only=True
        )


def test_it_works_without_privacy_too(tmp_path):
    averaging = AveragedWeights(0.9)
    used = trainer(tmp_path, averaging, max_epochs=1)
    used.fit(Watched(), loader(), loader(examples(30, seed=4)))
    assert "averaged/val/accuracy" in used.callback_metrics
    assert not any(isinstance(callback, PrivacyCallback) for callback in used.callbacks)
    assert isinstance(used, pl.Trainer)
