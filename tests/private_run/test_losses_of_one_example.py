"""Losses that look at their batch: in a private run each sees a batch of one example, as in a loop over single ones."""

import json
import math

import pytest
import torch
from plain_run import CLASSES, N, Plain, by_loop, examples, flat, loader, privacy, trainer, without_noise
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from dp_lightning.errors import ModelError

BOUND, STEPS = 1.0, 2


def of_one_example(dataset):
    """Batches of one example each, in steps on the whole data set."""
    return [[default_collate([example]) for example in dataset]] * STEPS


def by_run(tmp_path, module, dataset, **kwargs):
    """The parameters after the same steps of a private run, in physical batches of seven."""
    own = kwargs.pop("collate_fn", None)
    callback = without_noise(expected_batch_size=N, max_grad_norm=BOUND, **{"max_physical_batch_size": 7, **kwargs})
    run = trainer(tmp_path, callback, max_epochs=STEPS, precision="64-true")
    run.fit(module, loader(dataset, collate_fn=own))
    return flat(module)


def require_equal(tmp_path, module, dataset, **kwargs):
    expected = by_loop(module, of_one_example(dataset), bound=BOUND)
    assert_equal(by_run(tmp_path, module, dataset, **kwargs), expected)


def assert_equal(found, expected):
    # Bounds have room of 2^-19 for rounding, and the sum is one of float32 numbers.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


class Own(Plain):
    """A loss of one's own, of the module and its batch."""

    def __init__(self, loss_of, net=None):
        super().__init__(net)
        self.__dict__["loss_of"] = loss_of

    def training_step(self, batch, batch_idx):
        return self.loss_of(self, *batch)


def each(module, x, y):
    return F.cross_entropy(module.net(x), y, reduction="none")


def class_weights(module, x, y):
    return F.cross_entropy(module.net(x), y, weight=torch.tensor([1.0, 1.0, 9.0], dtype=x.dtype))


def ignored_labels(module, x, y):
    # Not a number for an example that is ignored; it contributes nothing.
    return F.cross_entropy(module.net(x), y, ignore_index=2)


def contrastive(module, x, y):
    z = module.net(x)
    alike = (y[:, None] == y).to(x.dtype) - torch.eye(len(z), dtype=x.dtype)
    return F.cross_entropy(z, y) + (alike * (z @ z.T)).sum() / len(z)


@pytest.mark.parametrize("loss_of", [class_weights, ignored_labels, contrastive], ids=lambda loss_of: loss_of.__name__)
def test_a_loss_over_the_batch_is_that_of_each_example(tmp_path, loss_of):
    require_equal(tmp_path, Own(loss_of), examples())


def plain_loss(module, x, y):
    return F.cross_entropy(module.net(x), y)


def by_a_mask(module, x, y):
    return each(module, x, y)[y >= 0].mean() + x.square()[x > 0].mean() * module.net[0].bias.sum()


def by_a_number(module, x, y):
    loss = each(module, x, y).mean()
    return loss * 0 if loss.detach() > 1.0 else loss


def with_a_penalty_on_its_input(module, x, y):
    x = x.clone().requires_grad_()
    loss = each(module, x, y)
    (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    return (loss + slope.square().sum(1)).mean()


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (by_a_mask, "x.mask"),
        (by_a_number, "torch.where"),
        (with_a_penalty_on_its_input, "requires_grad_"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_vmap_cannot_run_is_refused_with_the_line_and_is_exact_one_by_one(tmp_path, loss_of, words):
    with pytest.raises(ModelError, match=rf"{__name__}\.py:\d+.*{words}.*one_by_one"):
        by_run(tmp_path, Own(loss_of), examples())
    require_equal(tmp_path, Own(loss_of), examples(), examples="one_by_one")


def of_what_is_there(module, x, y):
    """Divides by the labels that are not missing: of the batch, which is the example."""
    there = y >= 0
    return torch.where(there, (module.net(x) - y.nan_to_num(0)).square(), 0).sum() / there.sum()


@pytest.mark.parametrize(("mark", "mode"), [(-1.0, "together"), (math.nan, "one_by_one")])
def test_a_mean_over_what_is_not_missing(tmp_path, mark, mode):
    targets = torch.rand(N, CLASSES)
    targets[torch.rand(targets.shape) < 0.4] = mark
    targets[3] = mark  # nothing of it is left
    require_equal(tmp_path, Own(of_what_is_there), TensorDataset(torch.randn(N, 5), targets), examples=mode)


def test_collation_of_ones_own_sees_one_example_and_its_views(tmp_path):
    path = tmp_path / "seen"  # a file, since collation may not keep a list

    def collate(rows):
        x, y, places = default_collate(rows)
        with path.open("a") as file:
            file.write(f"{places.tolist()}\n")
        return x, y

    dataset = TensorDataset(*examples().tensors, torch.arange(N))
    by_run(tmp_path, Own(plain_loss), dataset, collate_fn=collate, augmult=3, max_physical_batch_size=21)
    seen = [json.loads(line) for line in path.read_text().splitlines()]
    # The comparison of a batch's loss before the first step reads some examples first.
    assert seen[-STEPS * N :] == [[place] * 3 for place in range(N)] * STEPS
    assert all(len(places) == 3 for places in seen)


def simclr(module, x, y):
    """Two views of each image; all others of the batch are negatives."""
    z = F.normalize(torch.cat([module.net(x), module.net(x + 0.1)]))
    alike = (z @ z.T).fill_diagonal_(-1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))


def triplet(module, x, y):
    """The mean over the triplets of a batch, times zero where there are none."""
    z = module.net(x)
    other = (y[:, None] != y).to(x.dtype)
    return (torch.cdist(z, z) * other).sum() / other.sum().clamp_min(1)


def correlation(module, x, y):
    z = module.net(x)
    return ((z - z.mean(0)) / z.std(0)).square().mean()


def supervised_contrastive(module, x, y):
    z = module.net(x)
    others = 1 - torch.eye(len(z), dtype=x.dtype)
    return -((z @ z.T) * others).sum() / others.sum()


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [(simclr, "is zero"), (triplet, "is zero"), (correlation, "NaN"), (supervised_contrastive, "NaN")],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_loss_from_which_nothing_can_be_learned_is_refused_before_a_step_counts(tmp_path, loss_of, words, mode):
    callback = privacy(examples=mode)
    with pytest.raises(ModelError, match=rf"Nothing can be learned.*{words}.*batch of one example"):
        trainer(tmp_path, callback).fit(Own(loss_of), loader())
    assert callback.ledger.num_steps == 0


def at_rest_at_first(module, x, y):
    return plain_loss(module, x, y) * (module.trainer.global_step > 0)


def mostly_at_rest(module, x, y):
    return (each(module, x, y) * (y == 0)).mean()


@pytest.mark.parametrize(("loss_of", "expected"), [(mostly_at_rest, N), (at_rest_at_first, 1)])
def test_a_loss_that_is_at_rest_for_some_examples_trains(tmp_path, loss_of, expected):
    callback = privacy(expected_batch_size=expected)
    trainer(tmp_path, callback, max_steps=3, max_epochs=-1).fit(Own(loss_of), loader())
    assert callback.ledger.num_steps == 3
