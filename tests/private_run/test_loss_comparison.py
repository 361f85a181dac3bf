"""The warning before the first step: a loss that means something else for one example than for a batch."""

import re

import pytest
import torch
from plain_run import CLASSES, Plain, loader, parameters_after, privacy, trainer, without_noise, written
from torch import nn
from torch.nn import functional as F

from dp_lightning.private_run import run
from dp_lightning.private_run.loss_comparison import NAME


class InBatchNegatives(Plain):
    def training_step(self, batch, batch_idx):
        features = self.net(batch[0])
        own = F.cross_entropy(features, batch[1])
        return F.cross_entropy(features @ features.T, torch.arange(len(features))) + own


class Halved(Plain):
    """The same for a batch as for its examples."""

    def training_step(self, batch, batch_idx):
        weight = torch.full((3,), 2.0 + self.trainer.current_epoch)
        self.log("train_loss", loss := F.cross_entropy(self.net(batch[0]), batch[1], weight=weight) / 2)
        return loss


class Random(InBatchNegatives):
    """Two losses of one batch differ."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


class OneAtATime(Plain):
    """Takes no batch of several examples."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x.view(1, 5)), y)


class ByHand(Plain):
    """A weighted mean in one's own code."""

    def training_step(self, batch, batch_idx):
        weight = torch.tensor([1.0, 5.0, 20.0])[batch[1]]
        return (weight * F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")).sum() / weight.sum()


class CountedWeights(Plain):
    """Class weights from the labels of the batch."""

    def training_step(self, batch, batch_idx):
        x, targets = batch[0], F.one_hot(batch[1], CLASSES).float()
        rare = (1 - targets).sum(0) / targets.sum(0).clamp_min(1)
        return F.binary_cross_entropy_with_logits(self.net(x), targets, pos_weight=rare)


class Hooked(InBatchNegatives):
    """Its batch goes through a hook, as those of the data modules of this package do."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("kind", "warned"),
    [
        *((kind, True) for kind in (InBatchNegatives, ByHand, CountedWeights, Hooked)),
        *((kind, False) for kind in (Halved, Random, OneAtATime)),
    ],
)
def test_a_loss_that_is_no_mean_over_examples_is_named_and_listed(tmp_path, recwarn, kind, warned, fresh):
    module = kind()
    if fresh:  # all losses are equal, and so is each weighted mean of them
        nn.init.zeros_(module.net[-1].weight)
        nn.init.zeros_(module.net[-1].bias)
    trainer(tmp_path, callback := privacy(), max_epochs=1).fit(module, loader())
    assert sum("the mean of their losses" in str(warning.message) for warning in recwarn) == warned
    assert (NAME in written(callback)["unprotected"]) == warned


class Weighing(Plain):
    """Calls a loss of torch with weights."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(self.net(batch[0]), batch[1])}


WEIGHT = torch.tensor([1.0, 5.0, 20.0])
CANCELS = r"its weight cancels.*Write F\.{}\(\.\.\., weight=weight, reduction='none'\)\.mean\(\).*class_weights"


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), CANCELS.format("cross_entropy")),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), CANCELS.format("cross_entropy")),
        (lambda x, y: nn.NLLLoss(WEIGHT)(x.log_softmax(1), y), CANCELS.format("nll_loss")),
        (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), None),
        (lambda x, y: nn.CrossEntropyLoss(WEIGHT, reduction="none")(x, y).mean(), None),
        (lambda x, y: F.cross_entropy(x, F.one_hot(y, CLASSES).float(), weight=WEIGHT), None),
        (lambda x, y: nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(x, F.one_hot(y, CLASSES).float()), None),
    ],
)
def test_class_weights_that_mean_nothing_for_one_example_are_named(tmp_path, recwarn, mode, loss, message):
    module = Weighing(loss)
    trainer(tmp_path, callback := privacy(examples=mode), max_steps=1, max_epochs=-1).fit(module, loader())
    said = [
        str(one.message) for one in recwarn if re.search("training_step calls|mean of their losses", str(one.message))
    ]
    assert len(said) == (message is not None)
    assert message is None or re.search(message, said[0])
    assert NAME not in written(callback)["unprotected"]  # it tells nothing of the examples


def test_the_comparison_changes_no_step(tmp_path, monkeypatch):
    class Draws(Plain):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return super().training_step(batch, batch_idx) * self.calls + 0 * torch.rand(())

    torch.manual_seed(0)
    compared = parameters_after(tmp_path, without_noise(), module=Draws())
    state = torch.get_rng_state()
    monkeypatch.setattr(run, "warn_of_changed_meaning", lambda *args: False)
    torch.manual_seed(0)
    assert torch.equal(parameters_after(tmp_path, without_noise(), module=Draws()), compared)
    assert torch.equal(torch.get_rng_state(), state)
