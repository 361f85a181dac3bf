"""Ordinary training code, a few lines each, that trains unchanged."""

from dataclasses import dataclass, fields

import pytest
import torch
from plain_run import Plain, examples, held_out, loader, privacy, trainer
from torch import Tensor
from torch.utils.data import DataLoader

STEPS = 9  # three epochs of 60 examples in logical batches of 20


class MetricsInInference(Plain):
    """As segmentation_models_pytorch computes its scores."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.inference_mode():
            self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())
        return loss


@dataclass
class Item:
    """Its fields check their shapes, as those of anomalib do."""

    image: Tensor
    label: Tensor

    def __setattr__(self, name, value):
        assert isinstance(value, Tensor)
        assert value.shape[1:] == {"image": (5,), "label": ()}[name], value.shape
        super().__setattr__(name, value)


class OfItems(Plain):
    def train_dataloader(self):
        def collate(rows):
            return Item(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

        return DataLoader(examples(), batch_size=7, collate_fn=collate)

    def training_step(self, batch, batch_idx):
        return super().training_step([getattr(batch, field.name) for field in fields(batch)], batch_idx)


@pytest.mark.parametrize("kind", [MetricsInInference, OfItems])
def test_it_trains_unchanged(kind, tmp_path):
    module, callback = kind(), privacy(max_physical_batch_size=8)
    before = [p.detach().clone() for p in module.parameters() if p.requires_grad]
    run = trainer(tmp_path, callback)
    data = [] if isinstance(module, OfItems) else [loader()]
    run.fit(module, *data)
    assert run.global_step == callback.ledger.num_steps == STEPS
    assert callback.statement().release == "ok"
    after = [p.detach() for p in module.parameters() if p.requires_grad]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


class Validated(Plain):
    def __init__(self):
        super().__init__()
        self.validated, self.rates = [], []

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)

    def on_train_batch_end(self, *args):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


@pytest.mark.parametrize(
    ("settings", "steps", "validated"),
    [
        ({"val_check_interval": 2}, 9, [2, 5, 8, 9]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, 9, [2, 4, 6, 8, 9]),
        ({"limit_train_batches": 0.7}, 6, [2, 4, 6]),
        ({"max_steps": 7, "max_epochs": -1}, 7, [3, 6, 7]),
        ({"fast_dev_run": 2}, 2, [2]),
    ],
    ids=str,
)
def test_settings_that_count_batches_count_logical_steps(settings, steps, validated, tmp_path):
    """The weights of the last step are evaluated too, and so do schedules with a frequency."""
    module, callback = Validated(), privacy(max_physical_batch_size=8)
    run = trainer(tmp_path, callback, **settings)
    run.fit(module, loader(), held_out())
    assert run.global_step == callback.ledger.num_steps == callback.plan.num_steps == steps
    assert sorted(set(module.validated)) == validated
    assert run.estimated_stepping_batches == steps
    assert module.rates[:2] == [0.5, 0.25]
