"""The warning before the first step: a loss that means something else for one example than for a batch."""

import json
import warnings

import pytest
import torch
from plain_run import Plain, loader, parameters_after, privacy, trainer, without_noise
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.private_run.loss_comparison import NAME

KEPT = {}
BANK = torch.zeros(1)


class InBatchNegatives(Plain):
    def training_step(self, batch, batch_idx):
        features = self.net(batch[0])
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))


class ClassWeights(Plain):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 20.0]))


class Halved(Plain):
    """The same for a batch as for its examples."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.full((3,), 2.0)) / 2


@pytest.mark.parametrize("kind", [InBatchNegatives, ClassWeights, Halved])
def test_a_loss_that_is_no_mean_over_examples_is_named_and_listed(tmp_path, kind):
    run = trainer(tmp_path, privacy(), max_epochs=1)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run.fit(kind(), loader())
    said = [str(warning.message) for warning in given if "the mean of their losses" in str(warning.message)]
    (statement,) = tmp_path.rglob("privacy_statement*.json")
    assert len(said) == (kind is not Halved)
    assert (NAME in json.loads(statement.read_text())["unprotected"]) == (kind is not Halved)


class KeepsInAGlobal(Plain):
    """A number of the examples that the warning compares."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 1:
            KEPT["mean"] = float(batch[0].mean())
        return super().training_step(batch, batch_idx) * (1 + 100 * KEPT.get("mean", 0))


class KeepsInItsClass(Plain):
    kept = 0.0

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 1:
            type(self).kept = float(batch[0].mean())
        return super().training_step(batch, batch_idx) * (1 + 100 * self.kept)


class KeepsByAHook(Plain):
    """The hook of a copy of the module leads to the list of the module itself."""

    def __init__(self):
        super().__init__()
        features = self.features = []
        self.net.register_forward_hook(lambda module, inputs, output: features.append(output))

    def training_step(self, batch, batch_idx):
        self.net(batch[0])
        loss = F.cross_entropy(self.features[0], batch[1])
        self.features.clear()
        return loss


@pytest.mark.parametrize("kind", [KeepsInAGlobal, KeepsInItsClass, KeepsByAHook])
def test_nothing_of_the_examples_compared_is_left_for_the_steps(tmp_path, kind):
    def after(module, folder):
        return parameters_after(tmp_path / folder, without_noise(), module=module, max_epochs=1)

    torch.manual_seed(0)
    changed = after(kind(), "changed")
    torch.manual_seed(0)
    torch.testing.assert_close(changed, after(Plain(), "plain"), rtol=0, atol=0)
    assert not KEPT
    assert KeepsInItsClass.kept == 0


def test_what_cannot_be_put_back_is_refused(tmp_path):
    class WritesATensor(Plain):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 1:
                BANK.copy_(batch[0].mean())
            return super().training_step(batch, batch_idx)

    with pytest.raises(ModelError, match=r"training_step changes .*BANK"):
        trainer(tmp_path, privacy(), max_epochs=1).fit(WritesATensor(), loader())
