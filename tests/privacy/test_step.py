"""One logical step by itself: a loop in plain torch drives it as Lightning does."""

import _thread
import dataclasses
import enum
import functools
import importlib
import random
import sys
import threading
import time
import types
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.errors import BudgetError, ConfigurationError, DataError, DpLightningError, ModelError
from dp_lightning.privacy import ClipPlan, PrivacyPlan, PrivateStep
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum

N, B = 60, 12


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def examples(n=N):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 5, generator=generator), torch.arange(n) % 3)


def plan(**kwargs):
    numbers = {"num_train": N, "expected_batch_size": B, "num_steps": 10, "noise_multiplier": 1.0, "delta": 1e-3}
    return PrivacyPlan(**{**numbers, **kwargs})


def private_step(model, **kwargs):
    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    settings = {"plan": plan(), "max_physical_batch_size": 5, "seed": 0}
    return PrivateStep(model, kwargs.pop("loss", loss), kwargs.pop("dataset", examples()), **{**settings, **kwargs})


def trained(model, private, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture
def hidden(monkeypatch):
    """A module that code finds by its name only, so that the isolation does not see what stands in it."""
    module = types.ModuleType("hidden")
    monkeypatch.setitem(sys.modules, "hidden", module)
    return module


def find_hidden():
    return importlib.import_module("hidden")


@pytest.mark.parametrize("clipping", [ClipPlan.flat(max_grad_norm=0.1), ClipPlan.per_layer(max_grad_norm=0.1)])
def test_filled_batches_have_one_shape_and_give_the_same_weights(monkeypatch, clipping):
    begin, weights, sizes = ClippedSum.begin, [], []

    def noted(total, batch_size, counted=None):
        sizes[-1].add(batch_size)
        begin(total, batch_size, counted)

    monkeypatch.setattr(ClippedSum, "begin", noted)
    for filled in (False, True):
        sizes.append(set())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        weights.append(trained(model, private_step(model, constant_shapes=filled, clip_plan=clipping)))
    assert len(sizes[0]) > 1
    assert sizes[1] == {5}
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_what_fills_a_batch_is_not_counted():
    step = private_step(network(), constant_shapes=True)
    places = (place for number in range(10) for place in step.physical_batches(number))
    place = next(place for place in places if 0 < len(place.indices) < 5)
    batch = step.reader[place]
    assert len(batch) == 5
    assert batch.counted.tolist() == [True] * len(place.indices) + [False] * (5 - len(place.indices))
    real = torch.stack([examples()[index][0] for index in place.indices])
    torch.testing.assert_close(batch.examples[0][: len(real), 0], real)
    assert not any(torch.equal(row, x) for row in batch.examples[0][len(real) :, 0] for x, _ in examples())
    one_by_one = private_step(network(), constant_shapes=True, examples="one_by_one")
    assert len(one_by_one.reader[place]) == len(place.indices) + (place.piece == 0)  # the synthetic first one


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_plain_loop_and_lightning_give_the_same_weights_bit_for_bit(tmp_path, workers, ways):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Noisy(torch.utils.data.Dataset):
        """Augments with the global generator."""

        def __len__(self):
            return N

        def __getitem__(self, index):
            x, y = examples()[index]
            return x + 0.1 * torch.randn(5), y

    privacy = PrivacyCallback(
        expected_batch_size=B,
        noise_multiplier=1.0,
        delta=1e-3,
        accountant="rdp",
        max_physical_batch_size=5,
        reproducible=True,
        examples=ways,
    )
    trainer = pl.Trainer(
        callbacks=[privacy],
        max_steps=10,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Module()
    trainer.fit(module, DataLoader(Noisy(), batch_size=4, num_workers=workers))
    by_lightning = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    model = network()
    by_loop = trained(model, private_step(model, dataset=Noisy(), examples=ways))
    assert torch.equal(by_lightning, by_loop)
    assert not torch.equal(by_loop, torch.cat([p.detach().flatten() for p in network().parameters()]))


def test_the_release_is_the_clipped_sum_and_the_noise_over_the_expected_batch_size():
    model = network().eval()
    private = private_step(model, plan=plan(expected_batch_size=N, noise_multiplier=0.0))
    for batch in private.batches():
        private.accumulate(batch)
    private.release()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in examples():
        gradients = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for part, gradient in zip(total, gradients, strict=True):
            part += gradient * (1 / norm).clamp_max(1) / N
    for parameter, expected in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-6)


class Draws:
    """In the place of a sampler."""

    def __init__(self, *steps):
        self.steps = steps

    def draw(self, step):
        import numpy as np

        return np.array(self.steps[step % len(self.steps)], dtype=np.int64)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_an_empty_draw_is_a_step_of_noise(ways):
    model = network()
    private = private_step(model, plan=plan(noise_multiplier=2.0), seed=None, examples=ways)
    private._sampler = Draws([])
    released = []
    for _ in range(10):
        (batch,) = private.batches()
        assert not batch.counted.any()
        private.accumulate(batch)
        private.release()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert private.record.ledger.num_steps == 10
    # Nothing but noise: sigma C / B on each of 75 coordinates, ten times.
    assert float(torch.stack(released).std()) == pytest.approx(2 / B, rel=0.15)


def leave_out_every_third(views):
    x, y = torch.utils.data.default_collate(views)
    return None if int(y[0]) == 0 else (x, y)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_an_example_of_which_collation_leaves_nothing_contributes_zero(ways):
    found = []
    for collate_fn, wanted in ((leave_out_every_third, range(N)), (torch.utils.data.default_collate, None)):
        model = network().eval()
        private = private_step(
            model,
            plan=plan(expected_batch_size=N, noise_multiplier=0.0),
            collate_fn=collate_fn,
            examples=ways,
        )
        private._sampler = Draws([i for i in range(N) if wanted is not None or i % 3])
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


class Unreadable(TensorDataset):
    """Every third is None."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index % 3 else None


def drop_unreadable(views):
    return torch.utils.data.default_collate([view for view in views if view is not None])


def must_have_two(views):
    return views[0], views[1]


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize("collate_fn", [drop_unreadable, torch.utils.data.default_collate])
def test_an_example_that_is_none_contributes_zero_and_is_not_collated(ways, collate_fn):
    found = []
    for dataset in (Unreadable, TensorDataset):
        model = network().eval()
        private = private_step(
            model,
            plan=plan(expected_batch_size=N, noise_multiplier=0.0),
            dataset=dataset(*examples().tensors),
            collate_fn=collate_fn,
            examples=ways,
        )
        # Then a draw of nothing but unreadable examples, and one of none.
        private._sampler = Draws([i for i in range(N) if dataset is Unreadable or i % 3], [0, 3], [])
        for _ in range(3 if dataset is Unreadable else 1):
            for batch in private.batches():
                private.accumulate(batch)
            private.release()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    kept, of_unreadable, of_none, expected = found
    torch.testing.assert_close(kept, expected, rtol=0, atol=1e-6)
    assert expected.any()
    assert not of_unreadable.any()
    assert not of_none.any()


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_collation_that_takes_no_single_example_is_refused_in_one_message(ways):
    private = private_step(network(), collate_fn=must_have_two, examples=ways)
    private._sampler = Draws([1, 2])
    with pytest.raises(DataError, match=r"IndexError.*one example at a time"):
        list(private.batches())


def test_a_training_set_of_nothing_but_none_is_refused():
    class Nothing(TensorDataset):
        def __getitem__(self, index):
            return None

    private = private_step(network(), dataset=Nothing(*examples().tensors))
    with pytest.raises(DataError, match="Every example of the training set is None"):
        list(private.batches())


def test_a_logical_batch_of_nothing_but_left_out_examples_is_a_step():
    private = private_step(network(), collate_fn=leave_out_every_third)
    private._sampler = Draws([0, 3, 6], [1])
    for _ in range(2):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
    assert private.record.ledger.num_steps == 2


def test_the_data_set_is_asked_for_one_example_at_a_time():
    class Watched(TensorDataset):
        def __getitems__(self, indices):
            raise AssertionError("several examples at once")

    x, y = examples().tensors
    private = private_step(network(), dataset=Watched(x, y))
    trained(private.module, private, steps=2)


def test_examples_of_different_shapes_are_refused_with_the_fix():
    class Ragged(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return torch.zeros(5 + (index == 7)), 0

    private = private_step(network(), dataset=Ragged())
    private._sampler = Draws([1, 7], [1])
    with pytest.raises(DataError, match="pad or crop"):
        list(private.batches())
    # Also where they stand in different physical batches.
    private._sampler = Draws([1, 7])
    private._max_examples = 1
    first, second = private.batches()
    private.accumulate(first)
    with pytest.raises(DataError, match="pad or crop"):
        private.accumulate(second)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize("other", [lambda x, y: (x, None), lambda x, y: [x, y], lambda x, y: (x, y.int())])
def test_examples_of_different_structure_are_refused_in_whatever_batch(ways, other):
    def collate_fn(views):
        x, y = torch.utils.data.default_collate(views)
        return other(x, y) if y == 1 else (x, y)  # the examples 1, 4, 7, ...

    for max_examples in (1, 2):
        private = private_step(network(), collate_fn=collate_fn, examples=ways, max_physical_batch_size=max_examples)
        private._sampler = Draws([0, 1])
        with pytest.raises(DataError, match="different structure"):
            trained(private.module, private, steps=1)


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def twice(self):
        return 2 * self.x


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None = None
    twice = Pair.twice


class Encoding(UserDict):
    @property
    def twice(self):
        return 2 * self["x"]

    def __getattr__(self, name):
        return self.data[name]


def encoding(x, y, mask=None):
    return Encoding(x=x, y=y, mask=mask)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize("kind", [Pair, Frozen, encoding])
@pytest.mark.parametrize("inside", [False, True])
def test_batches_may_be_objects(ways, kind, inside):
    made = []
    for opened in (False, True):
        model = network()

        def collate_fn(views, opened=opened):
            x, y = torch.utils.data.default_collate(views)
            batch = kind(x, y) if opened else (x, y)
            return {"batch": [batch], "task": None} if inside else batch

        def loss(batch, opened=opened, model=model):
            if inside:
                assert batch["task"] is None
                (batch,) = batch["batch"]
            if not opened:
                return F.cross_entropy(model(2 * batch[0]), batch[1])
            assert batch.mask is None
            assert type(batch) is (Encoding if kind is encoding else kind)
            return F.cross_entropy(model(batch.twice), batch.y)

        made.append(trained(model, private_step(model, loss=loss, collate_fn=collate_fn, examples=ways), steps=3))
    assert torch.equal(*made)


def test_batches_without_a_tensor_are_refused_together_with_the_fix():
    model = network()

    def loss(batch):
        return model(torch.full((1, 5), float(len(batch[0])))).sum()

    settings = {"loss": loss, "collate_fn": lambda views: ["a name"]}
    with pytest.raises(DataError, match=r"no tensor.*one_by_one"):
        trained(model, private_step(model, **settings), steps=1)
    trained(model, private_step(model, **settings, examples="one_by_one"), steps=1)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_what_a_loss_has_changed_is_refused_in_its_own_batch(ways):
    model = network()
    model.seen = [0.0]

    def loss(batch):
        model.seen[0] += 1.0 if ways == "together" else float(batch[0].mean())
        model.seen.append(0.0)
        return F.cross_entropy(model(batch[0]), batch[1])

    private = private_step(model, loss=loss, examples=ways, max_physical_batch_size=N)
    (batch,) = private.batches()
    with pytest.raises(ModelError, match=r"training_step changes .*seen"):
        private.accumulate(batch)


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda model, x: setattr(model, "kept", x), r"self\.kept"),
        (lambda model, x: setattr(model, "bank", x * 1), r"self\.bank"),
        (lambda model, x: setattr(model.box, "inner", x * 1), r"self\.box\.inner"),
        (lambda model, x: model.found.update(last=x), r"self\.found\['last'\]"),
        (lambda model, x: setattr(find_hidden(), "kept", x), r"hidden\.kept"),
    ],
)
def test_the_place_of_a_tensor_that_is_kept_is_named(keep, name, hidden):
    model = network()
    model.box, model.found = SimpleNamespace(), {}
    model.register_buffer("bank", torch.zeros(1, 5))

    def loss(batch):
        keep(model, batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ModelError, match=rf"keeps a tensor of an example in {name}\."):
        trained(model, private_step(model, loss=loss), steps=1)


def test_a_hook_that_the_first_call_registers_is_refused_with_the_fix():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.hooked = network(), False

        def forward(self, x):
            if not self.hooked:
                self.net.register_forward_hook(lambda module, inputs, output: None)
                self.hooked = True
            return self.net(x)

    model = Lazy()
    with pytest.raises(ModelError, match=r"_forward_hooks\[.* call the model once before the fit"):
        trained(model, private_step(model), steps=1)
    model = Lazy()
    model(examples()[:1][0])
    trained(model, private_step(model), steps=1)


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        x, y = examples()[index]
        return x, y, f"image {index}"


def test_entries_that_are_no_tensors_may_stand_in_a_batch_and_not_be_used_together():
    model = network()

    def uses(batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * len(batch[2][0])

    def ignores(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    trained(model, private_step(model, dataset=Named(), loss=ignores), steps=1)
    with pytest.raises(ModelError, match="one_by_one"):
        trained(model, private_step(model, dataset=Named(), loss=uses), steps=1)
    trained(model, private_step(model, dataset=Named(), loss=uses, examples="one_by_one"), steps=1)


@pytest.mark.parametrize("keep", [lambda batch: batch[0], lambda batch: batch[0] * 1, lambda batch: batch[0][0]])
def test_one_by_one_a_tensor_that_is_kept_is_refused_in_the_next_loss(keep, hidden):
    model = network()
    hidden.kept = []

    def loss(batch):
        kept = find_hidden().kept
        others = sum(kept)
        kept[:] = [keep(batch)]
        return F.cross_entropy(model(batch[0] + others), batch[1])

    private = private_step(model, loss=loss, examples="one_by_one", max_physical_batch_size=N)
    with pytest.raises(ModelError, match="may hold other examples"):
        private.accumulate(next(private.batches()))


def test_one_by_one_a_tensor_in_an_object_of_the_batch_that_is_kept_is_refused_in_the_next_loss(hidden):
    model, hidden.kept = network(), []

    def collate_fn(views):
        x, y = torch.utils.data.default_collate(views)
        return SimpleNamespace(inner=[SimpleNamespace(x=x)]), y

    def loss(batch):
        if not isinstance(batch[0], SimpleNamespace):  # the synthetic one
            raise ValueError
        x, kept = batch[0].inner[0].x, find_hidden().kept
        others = sum(kept)
        kept[:] = [x]
        return F.cross_entropy(model(x + others), batch[1])

    settings = {"examples": "one_by_one", "max_physical_batch_size": N, "collate_fn": collate_fn}
    private = private_step(model, loss=loss, **settings)
    with pytest.raises(ModelError, match="may hold other examples"):
        private.accumulate(next(private.batches()))


def test_one_by_one_each_step_begins_with_a_synthetic_example_that_does_not_count(hidden):
    model = network()
    hidden.seen, hidden.named = seen, named = [], []

    def loss(batch):
        found = find_hidden()
        found.seen.append(bool((batch[0] != 1).any()))
        found.named.append(len(batch[2][0]))  # the first has no name: it would be that of an example
        return F.cross_entropy(model(batch[0]), batch[1])

    private = private_step(model, loss=loss, dataset=Named(), examples="one_by_one", max_physical_batch_size=2)
    batches = list(private.batches())
    for batch in batches:
        private.accumulate(batch)
    drawn = sum(len(batch.place.indices) for batch in batches)
    assert [bool(batch.counted.all()) for batch in batches] == [False, *[True] * (len(batches) - 1)]
    assert seen == [False, *[True] * drawn]
    assert len(named) == drawn


class ReadsAhead(torch.utils.data.Dataset):
    """By a thread of its own. Iteration and what is looked for in it go by ``__getitem__``."""

    def __init__(self):
        self.rows, self.count, self.error, self.over = examples(), 0, None, False
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        own = vars(self)
        try:
            while not self.over:
                assert len(self) == len(self.rows) == N
                assert self.name == "asked for"
                assert next(iter(self))[0] is not None
                assert self
                self.count += 1
        except BaseException as error:
            own["error"] = error

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return "asked for"

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_a_thread_of_the_data_sets_own_goes_on_while_losses_run(ways, hidden):
    model, dataset = network(), ReadsAhead()
    hidden.own = vars(dataset)

    def loss(batch):
        own = find_hidden().own
        before, end = own["count"], time.monotonic() + 30
        while own["count"] < before + 2 and own["error"] is None and time.monotonic() < end:
            time.sleep(0.001)
        return F.cross_entropy(model(batch[0]), batch[1])

    def uses(batch):
        return loss(batch) * len(dataset)

    try:
        trained(model, private_step(model, loss=loss, dataset=dataset, examples=ways), steps=1)
        assert dataset.error is None
        with pytest.raises(ModelError, match=r"uses a data set \(ReadsAhead\)"):
            trained(model, private_step(model, loss=uses, dataset=dataset, examples=ways), steps=1)
        assert dataset.error is None
    finally:
        dataset.over = True
        dataset.thread.join()


def test_a_thread_that_python_has_not_started_as_one_of_autograd_is_refused_the_data_set(hidden):
    model, dataset, hidden.found = network(), Named(), []
    found = hidden.found
    asked, answered = _thread.allocate_lock(), _thread.allocate_lock()
    asked.acquire()
    answered.acquire()

    def look():
        asked.acquire()
        try:
            found.append(dataset[0])
        except ModelError as error:
            found.append(error)
        answered.release()

    def loss(batch):
        if not find_hidden().found:
            asked.release()
            answered.acquire()
        return F.cross_entropy(model(batch[0]), batch[1])

    _thread.start_new_thread(look, ())
    trained(model, private_step(model, loss=loss, dataset=dataset), steps=1)
    assert "uses a data set" in str(found[0])


@pytest.mark.parametrize("make", [lambda: {f"word {i}": i for i in range(N)}, lambda: [f"class {i}" for i in range(N)]])
def test_a_vocabulary_that_the_data_set_shares_with_the_module_is_refused_with_the_fix(make):
    model, dataset = network(), examples()
    model.names = dataset.names = make()
    with pytest.raises(ModelError, match=r"self\.names is shared.*give the module a copy"):
        private_step(model, dataset=dataset).start()
    model.names = type(dataset.names)(dataset.names)
    trained(model, private_step(model, dataset=dataset), steps=1)


class Callable:
    """A loss that is no function."""

    def __init__(self, model):
        self.model, self.seen = model, 0.0

    def __call__(self, batch):
        self.seen += 1.5
        return F.cross_entropy(self.model(batch[0]), batch[1]) * self.seen


def closure(model):
    seen = []

    def loss(batch):
        seen.append(1.5)
        return F.cross_entropy(model(batch[0]), batch[1]) * sum(seen)

    return loss


COUNTS = []


def by_a_global(model):
    def loss(batch):
        COUNTS.append(1.5)
        return F.cross_entropy(model(batch[0]), batch[1]) * sum(COUNTS)

    return loss


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(closure, "loss.seen"), (by_a_global, "test_step.COUNTS"), (Callable, "")],
    ids=["closure", "global", "object"],
)
def test_what_a_loss_beside_the_module_keeps_is_refused_or_counts_for_nothing(make, name, ways):
    model = network()
    private = private_step(model, loss=make(model), examples=ways)
    if name:
        with pytest.raises(ModelError, match=f"training_step changes {name}"):
            trained(model, private, steps=1)
    else:
        trained(model, private, steps=2)
        assert private._loss.seen == (3.0 if ways == "together" else 0.0)  # once per logical step, or undone


DRAWS = {
    "numpy": lambda: np.random.rand(),
    "random": lambda: random.random(),
    "loss.draw": random.Random().random,
    "loss.draw.__self__": np.random.RandomState().rand,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_all_examples_would_share_are_refused_together(name):
    model, draw, dataset = network(), DRAWS[name], examples()

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * draw()

    with pytest.raises(ModelError, match=f"draws from {name}"):
        trained(model, private_step(model, loss=loss, dataset=dataset), steps=1)
    trained(model, private_step(model, loss=loss, dataset=dataset, examples="one_by_one"), steps=1)


def test_one_by_one_generators_of_the_loss_have_new_keys_for_each_example(hidden):
    model, generator = network(), np.random.default_rng(0)
    hidden.drawn = []

    def loss(batch):
        find_hidden().drawn.append(generator.random())
        return F.cross_entropy(model(batch[0]), batch[1])

    def drawn(seed):
        hidden.drawn.clear()
        trained(model, private_step(model, loss=loss, examples="one_by_one", seed=seed), steps=2)
        return list(hidden.drawn)

    first = drawn(3)
    assert len(set(first)) == len(first)
    assert drawn(3) == first
    assert not set(first) & {*drawn(None), *drawn(4), *np.random.default_rng(0).random(100)}


def test_generators_that_the_data_set_holds_get_secret_keys():
    class Augmented(TensorDataset):
        def __init__(self):
            super().__init__(*examples().tensors)
            self.generator = torch.Generator().manual_seed(0)

    dataset = Augmented()
    before = dataset.generator.get_state()
    private = private_step(network(), dataset=dataset, seed=None)
    private.start()
    assert not torch.equal(before, dataset.generator.get_state())


def test_secret_randomness_does_not_follow_public_seeds():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        private = private_step(network(), seed=None)
        torch.manual_seed(0)
        private.start()
        found.append(torch.rand(3))
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("layer", "name"),
    [(nn.LazyLinear(8), r"1\.weight"), (nn.LazyBatchNorm1d(affine=False).eval(), r"1\.running_mean")],
)
def test_lazy_layers_without_a_shape_are_refused_with_the_fix(layer, name):
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3))
    with pytest.raises(ModelError, match=rf"'{name}' belongs to a lazy layer.*batch of zeros"):
        private_step(model)
    model(torch.zeros(1, 5))
    trained(model, private_step(model), steps=1)


def test_a_step_beyond_the_plan_is_refused_before_its_gradients():
    model = network()
    private = private_step(model, plan=plan(num_steps=1))
    trained(model, private, steps=1)
    with pytest.raises(BudgetError, match="1 logical steps"):
        private.accumulate(next(iter(private.batches())))


def test_an_incomplete_or_reordered_logical_batch_is_refused():
    private = private_step(network())
    private._sampler = Draws(list(range(12)))
    first, second, third = private.batches()
    with pytest.raises(DpLightningError, match="complete"):
        private.release()
    private.accumulate(first)
    with pytest.raises(DpLightningError, match="complete"):
        private.release()
    with pytest.raises(DpLightningError, match="reordered"):
        private.accumulate(third)
    private.accumulate(second)
    private.accumulate(third)
    private.release()
    with pytest.raises(DpLightningError, match="reordered"):
        private.accumulate(second)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"examples": "both"}, "one_by_one"),
        ({"augmult": 0}, "augmult"),
        ({"augmult": 8}, "max_physical_batch_size"),
        ({"dataset": examples(59)}, "59"),
    ],
)
def test_wrong_settings_are_named(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        private_step(network(), **settings)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_views_are_rows_of_one_example(ways, hidden):
    model = network().eval()
    hidden.shapes = set()

    class Shifted(torch.utils.data.Dataset):
        """Views that differ."""

        count = 0

        def __len__(self):
            return N

        def __getitem__(self, index):
            x, y = examples()[index]
            return x + torch.randn(5), y

    def loss(batch):
        find_hidden().shapes.add(tuple(batch[0].shape))
        return F.cross_entropy(model(batch[0]), batch[1])

    private = private_step(model, dataset=Shifted(), loss=loss, augmult=2, examples=ways)
    trained(model, private, steps=1)
    assert hidden.shapes == {(2, 5)}
    assert private.statement().clipping["augmult"] == "2 views of each example"


NAMED = {"data": list(range(N)), "train": [float(i) for i in range(N)]}
globals().update(NAMED)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_an_attribute_is_no_global_of_its_name(ways):
    model = network()

    def loss(batch):
        model.train()
        return F.cross_entropy(model(batch[0]), batch[1]) + 0 * model[0].bias.detach().clone().sum()

    class Lists(torch.utils.data.Dataset):
        rows, labels = globals()["data"], globals()["train"]

        def __len__(self):
            return N

        def __getitem__(self, index):
            return torch.full((5,), self.labels[index]), self.rows[index] % 3

    trained(model, private_step(model, loss=loss, dataset=Lists(), examples=ways), steps=1)


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_a_loss_may_be_a_partial_of_a_function_with_keywords(ways):
    model = network()
    model.criterion = functools.partial(F.cross_entropy, label_smoothing=0.1)

    def loss(batch):
        return model.criterion(model(batch[0]), batch[1])

    trained(model, private_step(model, loss=loss, examples=ways), steps=2)


class Embedded(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 4, sparse=sparse)

    def forward(self, batch):
        return self.table(batch[1]).square().sum() + 0 * batch[0].sum()


@pytest.mark.parametrize("ways", ["together", "one_by_one"])
def test_a_sparse_embedding_is_as_a_dense_one(ways):
    found = []
    for sparse in (False, True):
        model = Embedded(sparse)
        found.append(trained(model, private_step(model, loss=model, examples=ways), steps=2))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_complex_parameters_are_refused_by_name():
    model = network()
    model.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"spectrum is complex.*view_as_complex"):
        private_step(model)


@pytest.mark.parametrize(
    "use", [lambda n: 2.0 / n, lambda n: n**2, lambda n: -n, lambda n: n // 2, lambda n: f"{n:.1f}"]
)
def test_whole_numbers_of_a_batch_are_refused_together_however_they_are_used(use):
    model = network()
    settings = {
        "loss": lambda batch: model(batch[0]).sum() * float(use(batch[1])),
        "collate_fn": lambda views: (views[0][0], 3),
    }
    with pytest.raises(ModelError, match="one_by_one"):
        trained(model, private_step(model, **settings), steps=1)


def test_an_entry_that_cannot_be_copied_is_refused_one_by_one():
    model = network()
    settings = {
        "loss": lambda batch: model(batch[0]).sum(),
        "collate_fn": lambda views: (views[0][0], threading.Lock()),
    }
    with pytest.raises(DataError, match=r"class lock cannot be copied"):
        trained(model, private_step(model, **settings, examples="one_by_one"), steps=1)


class Kind(enum.StrEnum):
    LONG = "x" * 2 * N


def test_a_text_is_no_training_set():
    dataset, model = examples(), network()
    dataset.kind = model.kind = Kind.LONG
    trained(model, private_step(model, dataset=dataset), steps=1)


class Counted(nn.Module):
    """As the page on one example shows it."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("steps", torch.zeros(()))
        self.plain = 0

    def forward(self, batch):
        self.steps += 1
        self.plain += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(("ways", "plain"), [("together", 3), ("one_by_one", 0)])
def test_a_buffer_counts_logical_steps_in_both_ways_and_an_attribute_together_only(ways, plain):
    model = Counted()
    trained(model, private_step(model, loss=model, examples=ways), steps=3)
    assert (float(model.steps), model.plain) == (3, plain)
