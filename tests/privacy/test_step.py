"""One logical step by itself, driven by a loop in plain torch, against a loop over single examples."""

import functools
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from plain_run import Plain, privacy, trainer
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dp_lightning.errors import BudgetError, DataError, DpLightningError, ModelError
from dp_lightning.privacy import ClipPlan, PrivateStep
from dp_lightning.privacy.reading import Reading

N, B = 60, 12
MODES = ["together", "one_by_one"]
PLANS = [ClipPlan.flat(max_grad_norm=0.5), ClipPlan.per_layer(max_grad_norm=0.5)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def examples(n=N):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 5, generator=generator), torch.arange(n) % 3)


def plan(num_train=N, **numbers):
    return plan_of(num_train, **{"expected_batch_size": B, "noise_multiplier": 1.0, **numbers})


def private_step(model, **kwargs):
    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    settings = {"plan": plan(), "max_physical_batch_size": 5, "seed": 0}
    return PrivateStep(model, kwargs.pop("loss", loss), kwargs.pop("dataset", examples()), **{**settings, **kwargs})


class Draws:
    """In the place of a sampler."""

    def __init__(self, *steps):
        self.steps = steps

    def draw(self, step):
        return np.array(self.steps[step % len(self.steps)], dtype=np.int64)


def sums(model, *draws, noise_multiplier=0.0, **kwargs):
    """The sums of clipped gradients of these draws, without noise."""
    private = private_step(model, plan=plan(noise_multiplier=noise_multiplier), **kwargs)
    private._sampler = Draws(*draws)
    return [B * released(private) for _ in draws]


def trained(model, private, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        released(private)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def clipped(model, loss, clip_plan):
    """One example's contribution in float64."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    groups = clip_plan.groups(names)
    for group, bound in zip(groups.values(), clip_plan.bounds(groups), strict=True):
        norm = torch.cat([gradients[name].flatten() for name in group]).norm()
        for name in group:
            gradients[name] *= min(1.0, bound / float(norm))
    return torch.cat([gradients[name].flatten() for name in names])


# What is released


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_plan", PLANS, ids=lambda each: each.kind)
@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_sum_is_that_of_a_loop_whatever_the_physical_batch_size(mode, clip_plan, size):
    draw, model = range(0, N, 4), network().eval()
    double, data = network().eval().double(), examples()
    expected = sum(
        clipped(double, F.cross_entropy(double(data[i][0][None].double()), data[i][1][None]), clip_plan) for i in draw
    )
    settings = {"examples": mode, "clip_plan": clip_plan, "max_physical_batch_size": size}
    (found,) = sums(model, draw, **settings)
    # float32 against float64, of a sum of fifteen vectors of at most half a unit.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


class Group(Dataset):
    """Elements of persons, and how often each is read."""

    def __init__(self):
        self.rows, self.groups = examples(), [i % 20 for i in range(N)]
        self.read = torch.zeros(N)

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.read[index] += 1
        x, y = self.rows[index]
        return x + self.read[index], y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("augmult", "images"), [(2, None), (1, 3), (2, 3)])
def test_views_and_the_images_of_a_person_are_rows_of_one_example(mode, augmult, images):
    """All three images of a person are drawn, and each view of an image differs from the one before."""
    model, data, shapes = network().eval(), Group(), set()
    double, clip_plan = network().eval().double(), ClipPlan.flat(max_grad_norm=0.5)

    def loss(batch):
        shapes.add(tuple(batch[0].shape))
        return F.cross_entropy(model(batch[0]), batch[1])

    expected = 0
    for example in range(6):
        rows = [example] if images is None else [example, example + 20, example + 40]
        x = torch.stack([data.rows[i][0].double() + view for i in rows for view in range(1, augmult + 1)])
        y = torch.stack([data.rows[i][1] for i in rows for _ in range(augmult)])
        expected = expected + clipped(double, F.cross_entropy(double(x), y), clip_plan)
    settings = {"clip_plan": clip_plan, "reading": Reading(augmult=augmult, images_per_group=images), "examples": mode}
    settings["plan"] = plan(num_train=N if images is None else 20, noise_multiplier=0.0)
    private = private_step(model, loss=loss, dataset=data, max_physical_batch_size=13, **settings)
    private._sampler = Draws(range(6))
    torch.testing.assert_close(B * released(private).double(), expected, rtol=0, atol=2e-6)
    assert shapes == {(augmult * (images or 1), 5)}
    clipping = private.statement().clipping
    assert ("augmult" in clipping, "images_per_group" in clipping) == (augmult > 1, images is not None)


class Noisy(Dataset):
    """Augments with the global generator."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        x, y = examples()[index]
        return x + 0.1 * torch.randn(5), y


@pytest.mark.parametrize(("mode", "workers"), [("together", 2), ("one_by_one", 0)])
def test_the_plain_loop_and_lightning_give_the_same_weights_bit_for_bit(tmp_path, workers, mode):
    settings = privacy(expected_batch_size=B, max_physical_batch_size=5, reproducible=True, examples=mode)
    module = Plain(network(), lr=0.1)
    loader = DataLoader(Noisy(), batch_size=4, num_workers=workers)
    trainer(tmp_path, settings, max_steps=10, max_epochs=-1).fit(module, loader)
    by_lightning = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    model = network()
    by_loop = trained(model, private_step(model, dataset=Noisy(), examples=mode))
    assert torch.equal(by_lightning, by_loop)
    assert not torch.equal(by_loop, torch.cat([p.detach().flatten() for p in network().parameters()]))


# Which examples take part


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_plan", PLANS, ids=lambda each: each.kind)
def test_an_example_moves_the_sum_by_at_most_the_sensitivity_and_by_nothing_where_it_is_not_finite(mode, clip_plan):
    draws = [range(1, 8), range(8)]
    for scale in (1e-30, 1.0, 1e4, 1e15, 1e30, math.inf, math.nan):
        data = examples()
        data.tensors[0][0] *= scale
        model = network().eval()
        settings = {"dataset": data, "clip_plan": clip_plan, "examples": mode}
        without, with_it = sums(model, *draws, loss=lambda batch, model=model: model(batch[0]).sum(), **settings)
        moved = float((with_it - without).double().norm())
        # Rounding of a sum of eight clipped gradients in float32.
        assert moved <= clip_plan.sensitivity * (1 + 1e-5) + 1e-6
        assert moved < 1e-5 or math.isfinite(scale)
        assert moved > 0.9 * clip_plan.sensitivity or scale != 1e4  # the bound is met


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_draw_is_a_step_of_noise(mode):
    private = private_step(network(), plan=plan(noise_multiplier=2.0), seed=None, examples=mode)
    private._sampler = Draws([])
    (batch,) = private.batches()
    assert not batch.counted.any()
    found = [released(private) for _ in range(10)]
    assert private.record.ledger.num_steps == 10
    # Nothing but noise: sigma C / B on each of 75 coordinates, ten times.
    assert float(torch.stack(found).std()) == pytest.approx(2 / B, rel=0.15)


class Unreadable(TensorDataset):
    """Every third is None."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index % 3 else None


def nothing_of_every_third(views):
    x, y = default_collate(views)
    return None if int(y[0]) == 0 else (x, y)


def drop_unreadable(views):
    return default_collate([view for view in views if view is not None])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [(TensorDataset, nothing_of_every_third), (Unreadable, default_collate), (Unreadable, drop_unreadable)],
)
def test_an_example_that_is_none_or_that_collation_leaves_out_contributes_zero(mode, dataset, collate_fn):
    (expected,) = sums(network().eval(), [i for i in range(N) if i % 3], examples=mode)
    settings = {"dataset": dataset(*examples().tensors), "reading": Reading(collate_fn=collate_fn), "examples": mode}
    found, of_left_out, of_none = sums(network().eval(), range(N), [0, 3], [], **settings)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.any()
    assert not of_left_out.any()
    assert not of_none.any()


def test_a_draw_that_was_abandoned_enters_no_release():
    private = private_step(network().eval(), plan=plan(noise_multiplier=0.0))
    private._sampler = Draws(range(12))
    first, *_ = private.batches()
    private.accumulate(first)
    torch.testing.assert_close(B * released(private), *sums(network().eval(), range(12)), rtol=0, atol=1e-6)


def test_an_incomplete_or_reordered_logical_batch_is_refused():
    private = private_step(network())
    private._sampler = Draws(list(range(12)))
    first, second, third = private.batches()
    private.accumulate(first)
    with pytest.raises(DpLightningError, match="complete"):
        private.release()
    with pytest.raises(DpLightningError, match="does not come next"):
        private.accumulate(third)
    private.accumulate(second)
    private.accumulate(third)
    private.release()
    with pytest.raises(DpLightningError, match="does not come next"):
        private.accumulate(second)


def test_one_draw_enters_one_release():
    private = private_step(network(), plan=plan(noise_multiplier=0.0))
    batches = list(private.batches())
    for batch in batches:
        private.accumulate(batch)
    private.release()
    with pytest.raises(DpLightningError, match="batches\\(\\) of each step anew"):
        private.accumulate(batches[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_physical_batch_that_failed_is_not_added_again(mode):
    model, fails = network().eval(), False

    def loss(batch):
        if fails:
            raise ArithmeticError
        return F.cross_entropy(model(batch[0]), batch[1])

    private = private_step(model, loss=loss, examples=mode, plan=plan(noise_multiplier=0.0))
    private._sampler = Draws(range(12))
    first, second, third = private.batches()
    private.accumulate(first)
    fails = True
    with pytest.raises(ModelError, match="ArithmeticError"):
        private.accumulate(second)
    fails = False
    for again in (second, third):
        with pytest.raises(DpLightningError, match="does not come next"):
            private.accumulate(again)
    torch.testing.assert_close(B * released(private), *sums(network().eval(), range(12), examples=mode))
    assert private.statement().faults == ("a step ended by an error (ModelError)",)


def test_a_step_beyond_the_plan_is_refused_before_its_gradients():
    private = private_step(network(), plan=plan(num_steps=1))
    released(private)
    for refused in (lambda: private.accumulate(next(private.batches())), private.release, private.require_budget):
        with pytest.raises(BudgetError, match="1 logical steps"):
            refused()
    assert private.record.ledger.num_steps == 1


# Random numbers


class OwnGenerator(nn.Module):
    """Drops inputs by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.generator = network(), torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.net(x * torch.rand(x.shape[-1], generator=self.generator))


class Jitter:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x + float(self.rng.normal())


class Augmented(TensorDataset):
    """Augments by transforms that have a generator of their own."""

    def __init__(self, *transforms):
        super().__init__(*examples().tensors)
        self.transforms = list(transforms)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        for transform in self.transforms:
            x = transform(x)
        return x, y


RANDOM = {
    "dropout": (lambda: (network(), examples()), MODES),
    "a generator of the module": (
        lambda: (OwnGenerator().eval(), examples()),
        ["one_by_one"],
    ),  # vmap refuses its draws
    "a generator in a list of transforms": (lambda: (network().eval(), Augmented(Jitter())), MODES),
    "a generator in a partial function": (
        lambda: (network().eval(), Augmented(functools.partial(Jitter.__call__, Jitter()))),
        MODES,
    ),
    "the global generator in the data set": (lambda: (network().eval(), Noisy()), MODES),
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, (_, modes) in RANDOM.items() for mode in modes])
def test_public_seeds_fix_nothing_and_the_seed_of_a_reproducible_run_everything(kind, mode):
    def first(seed):
        model, dataset = RANDOM[kind][0]()
        pl.seed_everything(0)
        private = private_step(model, dataset=dataset, seed=seed, examples=mode, plan=plan(noise_multiplier=0.0))
        private._sampler = Draws(range(12))
        batches = list(private.batches())
        pl.seed_everything(0)  # as where workers have read
        for batch in batches:
            private.accumulate(batch)
        private.release()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert not torch.equal(first(None), first(None))
    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


# How an example is read


def test_collation_that_takes_no_single_example_is_refused_in_one_message():
    private = private_step(network(), reading=Reading(collate_fn=lambda views: (views[0], views[1])))
    private._sampler = Draws([1, 2])
    with pytest.raises(DataError, match=r"IndexError.*one example at a time"):
        list(private.batches())


@pytest.mark.parametrize("other", [lambda x, y: [x, y], lambda x, y: (x, y.int()), lambda x, y: (x[:, 1:], y)])
def test_examples_of_different_structure_or_shape_are_refused_in_whatever_batch(other):
    def collate_fn(views):
        x, y = default_collate(views)
        return other(x, y) if y == 1 else (x, y)  # the examples 1, 4, 7, ...

    for size in (1, 2):
        private = private_step(network(), reading=Reading(collate_fn=collate_fn), max_physical_batch_size=size)
        private._sampler = Draws([0, 1])
        with pytest.raises(DataError, match=r"different structure or shape.*pad or crop"):
            released(private)


def named(views):
    return *default_collate(views), "a name", 3


USES = {
    "format": lambda batch: float(f"{batch[2]}" != "" or 1),
    "compare": lambda batch: 1 + (batch[2] == "a name"),
    "number": lambda batch: float(batch[3]),
}


@pytest.mark.parametrize("use", USES)
def test_entries_that_are_no_tensors_may_stand_in_a_batch_and_be_used_one_by_one_only(use):
    def step(used, mode):
        model = network()

        def loss(batch):
            return F.cross_entropy(model(batch[0]), batch[1]) * (USES[use](batch) if used else 1)

        return private_step(model, loss=loss, reading=Reading(collate_fn=named), examples=mode)

    released(step(False, "together"))
    released(step(True, "one_by_one"))
    with pytest.raises(ModelError, match="one_by_one"):
        released(step(True, "together"))


def test_one_by_one_each_step_begins_with_a_synthetic_example_that_does_not_count():
    model, seen = network(), []

    def loss(batch):
        seen.append(bool((batch[0] != 1).any()))
        return F.cross_entropy(model(batch[0]), batch[1])

    private = private_step(model, loss=loss, examples="one_by_one", max_physical_batch_size=2)
    batches = list(private.batches())
    for batch in batches:
        private.accumulate(batch)
    assert [bool(batch.counted.all()) for batch in batches] == [False, *[True] * (len(batches) - 1)]
    assert seen == [False, *[True] * sum(len(batch.place.indices) for batch in batches)]


# What is trained


def test_complex_parameters_are_refused_by_name():
    model = network()
    model.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"spectrum is complex.*view_as_complex"):
        private_step(model)


class Embedded(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 4, sparse=sparse)

    def forward(self, batch):
        return self.table(batch[1]).square().sum() + 0 * batch[0].sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_sparse_embedding_is_as_a_dense_one(mode):
    models = [Embedded(sparse) for sparse in (False, True)]
    dense, sparse = (trained(model, private_step(model, loss=model, examples=mode), steps=2) for model in models)
    torch.testing.assert_close(dense, sparse, rtol=0, atol=0)
