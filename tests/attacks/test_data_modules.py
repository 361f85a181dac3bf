"""What a data module holds beside the training set carries nothing from one example to another."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from plain_run import Plain, examples, loader, privacy, trainer
from torch import nn
from torch.utils.data import DataLoader

from dp_lightning.datamodules import NpzImages
from dp_lightning.errors import ModelError
from dp_lightning.privacy.isolation import contents


class Remembers(pl.LightningDataModule):
    """Its hook writes each example into a row of its test set, and adds that row to the next."""

    def __init__(self):
        super().__init__()
        self.test_set = examples(10)
        self.test_loader = DataLoader(self.test_set)

    def train_dataloader(self):
        return loader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        row = self.row()
        x = x + row
        row.copy_(x[0].detach())
        return [x, y]

    def row(self):
        return self.test_set.tensors[0][0]


class ByItsLoader(Remembers):
    def row(self):
        return self.test_loader.dataset.tensors[0][0]


class OnItsLoader(Remembers):
    def row(self):
        if not hasattr(self.test_loader, "memory"):
            self.test_loader.memory = torch.zeros(5)
        return self.test_loader.memory


class OfAnother(Remembers):
    """A data module that it holds."""

    def __init__(self):
        super().__init__()
        self.inner = Remembers()

    def row(self):
        return self.inner.row()


@pytest.mark.parametrize("kind", [Remembers, ByItsLoader, OnItsLoader, OfAnother])
@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_other_data_sets_of_a_data_module_are_no_memory(tmp_path, kind, mode):
    callback = privacy(examples=mode)
    with pytest.raises(ModelError):
        trainer(tmp_path, callback).fit(Plain(), datamodule=kind())
    assert callback.ledger.num_steps == 0


class Network(Plain):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)))


def test_images_in_memory_are_not_compared_at_each_batch(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (600, 32, 32, 3), np.uint8)
    labels = np.arange(600) % 3
    np.savez(tmp_path / "images.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    sizes, hashed = [], contents._hash

    def noted(memory):
        sizes.append(memory.numel() * memory.itemsize)
        return hashed(memory)

    monkeypatch.setattr(contents, "_hash", noted)
    data = NpzImages(path=tmp_path / "images.npz")
    callback = privacy(expected_batch_size=40, max_physical_batch_size=10)
    trainer(tmp_path, callback, max_epochs=1, limit_val_batches=0).fit(Network(), datamodule=data)
    assert callback.ledger.num_steps == 15
    assert max(sizes, default=0) < images.nbytes
