"""Configurations take their steps on a device without memory: no device is mixed, and none is waited for."""

import pytest
import torch
from devices import OneDevice, stand_in_for_a_gpu, trainers_use_it
from plain_run import Plain, privacy, trainer
from test_configs import CONFIGS, small_run
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from dp_lightning.cli import main
from dp_lightning.privacy.step import PrivateStep

EXAMPLES, STEPS, PHYSICAL = 12, 2, 7


def waits_of(monkeypatch, fit):
    """Where, in the steps of a fit on the device, a number was read, or a tensor was sent by a copy that waits.

    The first step alone reads whether an example has a gradient.
    """
    accumulate, batches = PrivateStep.accumulate, []

    def counted(step, batch):
        batches.append(batch)
        accumulate(step, batch)

    stand_in_for_a_gpu(monkeypatch)
    monkeypatch.setattr(PrivateStep, "accumulate", counted)
    device = OneDevice()
    with trainers_use_it(monkeypatch), device:
        fit()
    assert len(batches) == 2 * STEPS
    loop, screen = "training_epoch_loop.py", "result.py"  # Lightning reads what stands in its progress bar
    waits = [
        " < ".join(frame.rpartition("/")[2] for frame in reversed(place[-16:]) if "lightning" in frame)
        for place in (*device.reads, *device.waits_for_copies)
        if any(loop in frame and frame.endswith(" advance") for frame in place)
        and not any(screen in frame and frame.endswith(" metrics") for frame in place)
    ]
    (first,) = [place for place in waits if " _require_gradients < " in place]
    return [place for place in waits if place != first]


# Of the runs that ship, those whose steps take operations that the others do not take.
DIFFERING = ("random_wrn16_cifar10", "de_wrn16_cifar10_muon", "vit_small_cifar100")


@pytest.mark.parametrize("stem", DIFFERING)
def test_a_run_stays_on_its_device_and_waits_for_it_in_no_step(stem, tmp_path, monkeypatch):
    quiet = {"max_steps": STEPS, "limit_val_batches": 0, "enable_checkpointing": False}
    sizes = {"expected_batch_size": EXAMPLES, "max_physical_batch_size": PHYSICAL}  # two physical batches a step
    line = small_run(CONFIGS / f"{stem}.yaml", tmp_path, trainer=quiet, privacy=sizes)
    assert waits_of(monkeypatch, lambda: main(line)) == []


class Logs(Plain):
    """Logs what can be logged; its metrics do not look at what they are given."""

    def __init__(self):
        super().__init__()
        settings = {"num_classes": 3, "average": "micro", "validate_args": False}
        self.mean, self.accuracy = MeanMetric(nan_strategy="disable"), MulticlassAccuracy(**settings)
        self.scores = MetricCollection({"micro": MulticlassAccuracy(**settings)})
        self.called = MulticlassAccuracy(**settings)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("number", 2.5)
        self.log("tensor", torch.tensor(2.5))
        self.log("result", self.accuracy(logits, batch[1]))
        self.mean.update(loss)
        self.log("metric", self.mean)
        self.called(logits, batch[1])
        self.log("called", self.called, on_step=True, on_epoch=True)
        self.log_dict(self.scores(logits, batch[1]))
        return loss


@pytest.mark.parametrize("examples_", ["together", "one_by_one"])
def test_what_is_logged_is_waited_for_by_nobody(examples_, tmp_path, monkeypatch):
    settings = {"expected_batch_size": EXAMPLES, "max_physical_batch_size": PHYSICAL}
    callback = privacy(num_train=EXAMPLES, examples=examples_, **settings)
    data = TensorDataset(torch.zeros(EXAMPLES, 5), torch.zeros(EXAMPLES, dtype=torch.long))
    run = trainer(tmp_path, callback, max_steps=STEPS, max_epochs=-1)
    assert waits_of(monkeypatch, lambda: run.fit(Logs(), DataLoader(data, batch_size=4))) == []
