"""Augmentation multiplicity: the mean over an example's views is clipped once, in a run of any module."""

import copy
import dataclasses
import json

import pytest
import torch
from plain_run import N, PhysicalBatches, Plain, examples, loader, privacy, trainer, without_noise
from torch.nn import functional as F
from torch.utils.data import Dataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Kalman
from dp_lightning.privacy.disk import DiSK

# Clips about half of the examples.
BOUND, LR = 1.8, 0.5


class Augmented(Dataset):
    """Each reading of an example gives another view; the label tells views of one example apart from another's."""

    def __init__(self):
        self.xs, self.ys = examples().tensors

    def __len__(self):
        return len(self.xs)

    def __getitem__(self, index):
        return self.xs[index] + 0.5 * torch.randn(5), self.ys[index], index


class Seen(Plain):
    def __init__(self):
        super().__init__(lr=LR)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def fitted(tmp_path, callback, module=None, dataset=None, **kwargs):
    torch.manual_seed(0)
    module = module or Seen()
    start = copy.deepcopy(module.net)
    batches = PhysicalBatches()
    run = trainer(tmp_path, callback, batches, **{"max_steps": 4, "max_epochs": -1, **kwargs})
    run.fit(module, loader(dataset or Augmented()))
    return run, module, start, batches.rows


def by_loop(net, views, labels, augmult):
    """One noiseless step on every example, in float64: mean over views, then the clip."""
    total, norms = [torch.zeros_like(p) for p in net.parameters()], []
    for rows, y in zip(views.split(augmult), labels.split(augmult), strict=True):
        mean = [torch.zeros_like(p) for p in net.parameters()]
        for row in rows:
            for m, g in zip(
                mean, torch.autograd.grad(F.cross_entropy(net(row[None]), y[:1]), list(net.parameters())), strict=True
            ):
                m += g / augmult
        norm = float(torch.cat([m.flatten() for m in mean]).norm())
        norms.append(norm)
        for t, m in zip(total, mean, strict=True):
            t += m * min(1.0, BOUND / norm)
    with torch.no_grad():
        for p, t in zip(net.parameters(), total, strict=True):
            p -= LR * t / N
    return norms


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
@pytest.mark.parametrize("augmult", [1, 3, 8])
def test_a_run_clips_the_mean_over_views(tmp_path, augmult, mode):
    callback = without_noise(
        expected_batch_size=N,
        max_grad_norm=BOUND,
        max_physical_batch_size=25,
        augmult=augmult,
        examples=mode,
    )

    _, module, net, batches = fitted(tmp_path, callback, Seen())
    assert all(len(x) <= 25 and len(x) % augmult == 0 for x, _, _ in batches)
    xs, ys, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    # Views of one example follow each other, and differ.
    assert torch.equal(indices, torch.arange(N).repeat_interleave(augmult).repeat(4))
    assert len(xs.unique(dim=0)) == 4 * N * augmult
    net = net.double()
    norms = []
    for views, labels in zip(xs.double().split(N * augmult), ys.split(N * augmult), strict=True):
        norms += by_loop(net, views, labels, augmult)
    assert 0.2 < sum(norm > BOUND for norm in norms) / len(norms) < 0.9
    ours = torch.cat([p.detach().flatten() for p in module.parameters()]).double()
    wanted = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_poisson_draws_empty_ones_too_take_their_steps(tmp_path):
    callback = privacy(expected_batch_size=1, noise_multiplier=2.0, max_physical_batch_size=4, augmult=4)
    run, _, _, batches = fitted(tmp_path, callback, max_steps=40)
    assert run.global_step == callback.ledger.num_steps == 40
    sizes = {len(indices) for _, _, indices in batches}
    assert sizes == {0, 4}
    assert all(len(indices.unique()) == 1 for _, _, indices in batches if len(indices))


def test_the_statement_names_the_views(tmp_path):
    callback = privacy(augmult=4, max_physical_batch_size=32)
    fitted(tmp_path, callback)
    (statement,) = tmp_path.rglob("privacy_statement.json")
    clipping = json.loads(statement.read_text())["clipping"]
    assert clipping["augmult"] == "4 views of each example"
    assert "augmult: 4 views of each example" in statement.with_suffix(".md").read_text()


def test_another_number_of_views_is_refused_when_a_run_goes_on(tmp_path):
    run, *_ = fitted(tmp_path, privacy(augmult=2))
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = trainer(tmp_path, privacy(augmult=3), max_steps=8, max_epochs=-1)
    with pytest.raises(ConfigurationError, match=r"privacy\.augmult 2, and it is 3 now"):
        again.fit(Seen(), loader(Augmented()), ckpt_path=tmp_path / "run.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augmult": 0}, r"privacy\.augmult is"),
        ({"augmult": 4, "max_physical_batch_size": 3}, r"size is 3; it must be at least 4, privacy\.augmult"),
    ],
)
def test_numbers_of_views_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        privacy(**settings)


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Records(Dataset):
    """Its examples, and the batches of them, are objects."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return Record(*self.dataset[index][:2])

    @staticmethod
    def collate(records):
        return Record(torch.stack([record.x for record in records]), torch.stack([record.y for record in records]))


def test_views_may_be_objects(tmp_path):
    class TakesRecords(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch.x), batch.y)

    dataset = Records(Augmented())
    run = trainer(tmp_path, privacy(augmult=2), max_steps=2, max_epochs=-1)
    run.fit(TakesRecords(), loader(dataset, collate_fn=Records.collate))
    assert run.global_step == 2


@pytest.mark.parametrize("augmult", [1, 3])
def test_disk_takes_the_views_at_the_extrapolated_point(tmp_path, augmult):
    ends = []
    for mode in ("together", "one_by_one"):
        callback = without_noise(
            expected_batch_size=N,
            max_grad_norm=BOUND,
            max_physical_batch_size=25,
            augmult=augmult,
            examples=mode,
            disk=DiSK(0.7),
        )
        torch.manual_seed(0)
        module = Seen()
        run = trainer(tmp_path, callback, PostProcessCallback([Kalman(gain=0.7, applies_to="all")]), max_epochs=4)
        run.fit(module, loader(Augmented()))
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
