"""Augmentation multiplicity: the mean over an example's views is clipped once, in a run of any module."""

import copy
import dataclasses

import pytest
import torch
from plain_run import (
    N,
    PhysicalBatches,
    Plain,
    by_loop,
    examples,
    flat,
    loader,
    privacy,
    trainer,
    without_noise,
    written,
)
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.postprocess import Kalman
from dp_lightning.privacy.disk import DiSK

BOUND = 1.8  # clips about half of the examples


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


def fitted(tmp_path, callback, *others, module=None, **kwargs):
    torch.manual_seed(0)
    module, batches = module or Seen(), PhysicalBatches()
    start = copy.deepcopy(module)
    own = kwargs.pop("collate_fn", None)
    run = trainer(tmp_path, callback, *others, batches, **{"max_steps": 4, "max_epochs": -1, **kwargs})
    run.fit(module, loader(Augmented(), collate_fn=own))
    return run, module, start, batches.rows


def of_views(mode, augmult=3, **kwargs):
    settings = {"expected_batch_size": N, "max_grad_norm": BOUND, "max_physical_batch_size": 25}
    return without_noise(**settings, examples=mode, augmult=augmult, **kwargs)


@pytest.mark.parametrize(("augmult", "mode"), [(8, "together"), (3, "together"), (3, "one_by_one")])
def test_a_run_clips_the_mean_over_views(tmp_path, augmult, mode):
    _, module, start, batches = fitted(tmp_path, of_views(mode, augmult))
    assert all(len(x) <= 25 and len(x) % augmult == 0 for x, _, _ in batches)
    xs, ys, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    # Views of one example follow each other, and differ.
    assert torch.equal(indices, torch.arange(N).repeat_interleave(augmult).repeat(4))
    assert len(xs.unique(dim=0)) == 4 * N * augmult
    views = list(zip(xs.split(augmult), ys.split(augmult), strict=True))
    expected = by_loop(start, [views[N * step : N * (step + 1)] for step in range(4)], bound=BOUND)
    torch.testing.assert_close(flat(module).double(), expected, rtol=1e-5, atol=1e-6)


def test_poisson_draws_take_their_steps_empty_ones_too_and_the_statement_names_the_views(tmp_path):
    callback = privacy(expected_batch_size=1, noise_multiplier=2.0, max_physical_batch_size=4, augmult=4)
    run, _, _, batches = fitted(tmp_path, callback, max_steps=40)
    assert run.global_step == callback.ledger.num_steps == 40
    assert {len(indices) for _, _, indices in batches} == {0, 4}
    assert all(len(indices.unique()) == 1 for _, _, indices in batches if len(indices))
    assert written(callback)["clipping"]["augmult"] == "4 views of each example"


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


def test_views_may_be_objects(tmp_path):
    class TakesRecords(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch.x), batch.y)

    def collate(rows):
        return Record(*default_collate(rows)[:2])

    run, *_ = fitted(tmp_path, privacy(augmult=2), module=TakesRecords(), max_steps=2, collate_fn=collate)
    assert run.global_step == 2


def test_disk_takes_the_views_at_the_extrapolated_point(tmp_path):
    ends = []
    for mode in ("together", "one_by_one"):
        kalman = PostProcessCallback([Kalman(gain=0.7, applies_to="all")])
        ends.append(flat(fitted(tmp_path, of_views(mode, disk=DiSK(0.7)), kalman)[1]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
