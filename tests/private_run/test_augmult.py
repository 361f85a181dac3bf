"""Augmentation multiplicity in a run: the views of each example that its step sees, with DiSK too."""

import torch
from plain_run import N, PhysicalBatches, Plain, examples, flat, loader, privacy, trainer, without_noise, written
from torch.nn import functional as F
from torch.utils.data import Dataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.postprocess import Kalman
from dp_lightning.privacy.disk import DiSK


class Augmented(Dataset):
    """Each reading of an example gives another view; the last number tells views of one example from another's."""

    def __init__(self):
        self.xs, self.ys = examples().tensors

    def __len__(self):
        return len(self.xs)

    def __getitem__(self, index):
        return self.xs[index] + 0.5 * torch.randn(5), self.ys[index], index


class Seen(Plain):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_poisson_draws_take_their_steps_empty_ones_too_and_the_statement_names_the_views(tmp_path):
    callback = privacy(expected_batch_size=1, noise_multiplier=2.0, max_physical_batch_size=4, augmult=4)
    batches = PhysicalBatches()
    run = trainer(tmp_path, callback, batches, max_steps=40, max_epochs=-1)
    run.fit(Seen(), loader(Augmented()))
    assert run.global_step == callback.ledger.num_steps == 40
    # The views of one example are in one batch, and differ.
    assert {(len(x.unique(dim=0)), len(indices.unique())) for x, _, indices in batches.rows} == {(0, 0), (4, 1)}
    assert written(callback)["clipping"]["augmult"] == "4 views of each example"


def test_disk_takes_the_views_at_the_extrapolated_point(tmp_path):
    ends = []
    for mode in ("together", "one_by_one"):
        settings = {"expected_batch_size": N, "max_grad_norm": 1.8, "max_physical_batch_size": 25}
        callback = without_noise(**settings, examples=mode, augmult=3, disk=DiSK(0.7))
        kalman = PostProcessCallback([Kalman(gain=0.7, applies_to="all")])
        torch.manual_seed(0)
        module = Seen()
        trainer(tmp_path, callback, kalman).fit(module, loader(Augmented()))
        ends.append(flat(module))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
