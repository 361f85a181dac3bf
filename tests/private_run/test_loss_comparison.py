"""The warning before the first step: a loss that means something else for one example than for a batch."""

import pytest
import torch
from plain_run import Plain, loader, parameters_after, privacy, trainer, without_noise, written
from torch.nn import functional as F

from dp_lightning.private_run import run
from dp_lightning.private_run.loss_comparison import NAME


class InBatchNegatives(Plain):
    def training_step(self, batch, batch_idx):
        features = self.net(batch[0])
        own = F.cross_entropy(features, batch[1])
        return F.cross_entropy(features @ features.T, torch.arange(len(features))) + own


class ClassWeights(Plain):
    def training_step(self, batch):
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 20.0]))}


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


@pytest.mark.parametrize(
    ("kind", "warned"),
    [(InBatchNegatives, True), (ClassWeights, True), (Halved, False), (Random, False), (OneAtATime, False)],
)
def test_a_loss_that_is_no_mean_over_examples_is_named_and_listed(tmp_path, recwarn, kind, warned):
    trainer(tmp_path, callback := privacy(), max_epochs=1).fit(kind(), loader())
    assert sum("the mean of their losses" in str(warning.message) for warning in recwarn) == warned
    assert (NAME in written(callback)["unprotected"]) == warned


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
