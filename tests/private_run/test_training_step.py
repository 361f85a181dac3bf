"""What stands in the place of a module's training step, and what its hooks see."""

import functools
import weakref

import lightning.pytorch as pl
import pytest
import torch
from dp_lightning.privacy.isolation.state import StateSnapshot
from dp_lightning.private_run.training_step import is_no_state, names_of_libraries
from lightning.pytorch.callbacks import Callback
from plain_run import CLASSES, N, Plain, examples, loader, privacy, trainer, without_noise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, MetricCollection

from dp_lightning.errors import ModelError


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda module: None, "no loss"),
        (lambda module: torch.zeros(()), "any trained parameter"),
        (lambda module: module.net[0].bias.detach().sum(), "any trained parameter"),
        (lambda module: module.net[0].bias, "single number"),
    ],
)
@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_a_step_without_a_loss_is_refused(tmp_path, loss, words, examples):
    class Skips(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.trainer.global_step < 4 else loss(self)

    callback = privacy(examples=examples)
    with pytest.raises(ModelError, match=words):
        trainer(tmp_path, callback).fit(Skips(), loader())
    assert callback.ledger.num_steps == 4


class OneLoudExample(Plain):
    """Only the first example has a gradient, and it is far longer than C."""

    def training_step(self, batch, batch_idx):
        loud = (batch[0][:, 0] > 50).float()
        return (1e4 * loud * F.cross_entropy(self.net(batch[0] / 100), batch[1], reduction="none")).mean()


def loud_examples():
    x, y = examples().tensors
    x = x.clone()
    x[0] = 100.0
    return TensorDataset(x, y)


class MeasuredRelease(Callback):
    """Norms of the sums before noise, from releases without noise."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        total = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
        self.norms.append(float(total.norm()) * N)


def everyone(**kwargs):
    return without_noise(expected_batch_size=N, **kwargs)


def norms_of_releases(tmp_path, module, size, examples="together", **kwargs):
    measured = MeasuredRelease()
    callback = everyone(max_physical_batch_size=size, examples=examples)
    trainer(tmp_path, callback, measured, **kwargs).fit(module, loader(loud_examples()))
    return measured.norms


def test_one_example_contributes_exactly_its_bound(tmp_path):
    assert norms_of_releases(tmp_path, OneLoudExample(), 7) == pytest.approx([1.0] * 3, rel=1e-5)


def test_an_abandoned_logical_batch_is_dropped(tmp_path):
    class LeavesEpoch(OneLoudExample):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.trainer.current_epoch < 2 and batch_idx == 3 else None

    norms = norms_of_releases(tmp_path, LeavesEpoch(), 7, max_epochs=4)
    assert norms == pytest.approx([1.0] * len(norms), rel=1e-5)
    assert norms


@pytest.mark.parametrize("of", ["module", "callback"])
def test_outputs_of_the_training_step_are_refused_by_name(tmp_path, of):
    class Returns(Plain):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "preds": self.net(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert float(outputs["loss"]) == 0
            assert of == "callback" or outputs["preds"] is None

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert of == "module" or outputs["preds"] is None

    run = trainer(tmp_path, privacy(), Reads())
    with pytest.raises(ModelError, match=r"'preds'.*self\.log"):
        run.fit(Returns(), loader())
    assert "output_result_cls" not in vars(run.fit_loop.epoch_loop.automatic_optimization)


def test_hooks_of_the_module_are_called_once_for_each_logical_step_with_its_number(tmp_path):
    seen, pieces = [], []

    class Pieces(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            pieces.append(batch_idx)

    class Steps(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(("start", batch_idx))

        def on_before_backward(self, loss):
            self.backward_passes = getattr(self, "backward_passes", 0) + 1

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.param_groups[0]["lr"] = 0.1 * (batch_idx + 1)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            seen.append(("optimizer", batch_idx))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(("end", batch_idx))

    module = Steps()
    trainer(tmp_path, privacy(max_physical_batch_size=4), Pieces(), max_epochs=2).fit(module, loader())
    assert seen == [(name, step % 3) for step in range(6) for name in ("start", "optimizer", "end")]
    assert module.backward_passes == 6
    assert len(pieces) > 6
    assert not {"optimizer_step", "on_train_batch_start", "on_before_backward"} & set(vars(module))


def test_what_a_callback_counts_in_the_module_is_refused(tmp_path):
    class Counts(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.count = getattr(module, "count", 0) + 1

    with pytest.raises(ModelError, match=r"self\.count changed between two physical batches of one step"):
        trainer(tmp_path, privacy(max_physical_batch_size=4), Counts(), max_epochs=2).fit(Plain(), loader())


@pytest.mark.parametrize("size", [20, 100])
def test_gradients_taken_inside_training_step_do_not_count(tmp_path, size):
    class Saliency(OneLoudExample):
        def training_step(self, batch, batch_idx):
            x = batch[0].clone().requires_grad_()
            for _ in range(8):
                torch.autograd.grad(super().training_step((x, batch[1]), batch_idx), x)
            return super().training_step(batch, batch_idx)

    norms = norms_of_releases(tmp_path, Saliency(), size, examples="one_by_one")
    assert norms == pytest.approx([1.0] * 3, rel=1e-5)
    with pytest.raises(ModelError, match="one_by_one"):
        norms_of_releases(tmp_path, Saliency(), size)


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_backward_passes_of_hooks_do_not_count(tmp_path, examples):
    """They see a loss of zero."""

    class Twice(OneLoudExample):
        def on_before_backward(self, loss):
            loss.backward(retain_graph=True)
            (3 * loss).backward(retain_graph=True)

    assert norms_of_releases(tmp_path, Twice(), 7, examples=examples) == pytest.approx([1.0] * 3, rel=1e-5)


class Refused(Plain):
    """Takes a second gradient of its own in training_step."""

    def __init__(self, inside):
        super().__init__()
        self.__dict__["inside"] = inside

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.inside(self, loss)
        return loss


SECOND = {
    "backward": lambda module, loss: loss.backward(retain_graph=True),
    "autograd.grad": lambda module, loss: torch.autograd.grad(loss, module.net[0].weight, retain_graph=True),
    "tensor hook": lambda module, loss: loss.register_hook(lambda gradient: 2 * gradient),
    "module hook": lambda module, loss: module.net[0].register_full_backward_hook(lambda *args: None),
}


@pytest.mark.parametrize("inside", SECOND.values(), ids=SECOND)
def test_a_second_backward_pass_and_hooks_inside_of_the_step_are_refused(tmp_path, inside):
    callback = privacy()
    with pytest.raises(ModelError, match=r"one_by_one|training_step changes"):
        trainer(tmp_path, callback).fit(Refused(inside), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("kind", ["frozen parameter", "buffer"])
def test_a_tensor_that_the_forward_pass_writes_is_refused_by_name(tmp_path, start, kind, examples):
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            centre = torch.zeros(5)
            if kind == "buffer":
                self.register_buffer("centre", centre)
            else:
                self.centre = nn.Parameter(centre, requires_grad=False)
            self.on = False

        def forward(self, x):
            if self.on:
                with torch.no_grad():
                    self.centre.copy_(x.detach().mean(0))
            return x

    class Switch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.net[0].on = trainer.global_step >= start

    module, callback = Plain(nn.Sequential(Centre(), nn.Linear(5, CLASSES))), privacy(examples=examples)
    with pytest.raises(ModelError, match=r"centre|all examples share"):
        trainer(tmp_path, callback, Switch()).fit(module, loader())
    assert callback.ledger.num_steps == start
    if examples == "together":
        assert not module.net[0].centre.any()


def test_what_is_kept_of_earlier_examples_is_refused(tmp_path):
    kept = []

    class Slow(Plain):
        def training_step(self, batch, batch_idx):
            own = F.cross_entropy(self.net(batch[0]), batch[1])
            kept.append(own.detach() if not kept else 0.999 * kept[-1] + 0.001 * own.detach())
            return own / kept[-1]

    for mode in ("together", "one_by_one"):
        kept.clear()
        with pytest.raises(ModelError, match=r"training_step (keeps|changes|uses a tensor)"):
            trainer(tmp_path, privacy(examples=mode)).fit(Slow(), loader())


def test_a_training_step_that_is_an_attribute_is_the_modules_again_after_the_fit(tmp_path):
    module = Plain()
    own = module.training_step = functools.partial(Plain.training_step, module)
    trainer(tmp_path, privacy(), max_epochs=1).fit(module, loader())
    assert module.training_step is own


def test_a_loss_leaves_all_that_libraries_keep_in_their_objects():
    """Each name, of a module and of metrics; what is under it is not followed."""
    module = Plain()
    module.metric, module.metrics = MeanMetric(), MetricCollection([MeanMetric()])
    snapshot = StateSnapshot(module, is_no_state, by_identity=names_of_libraries)
    assert snapshot.changes() == []
    for path, owner in (("model", module), ("model.metric", module.metric), ("model.metrics", module.metrics)):
        assert len(names_of_libraries(owner)) >= 10
        for name in names_of_libraries(owner):
            before = vars(owner).copy()
            vars(owner)[name] = object()
            assert f"{path}.{name}" in [change.path for change in snapshot.changes()]
            vars(owner).clear()
            vars(owner).update(before)
    assert snapshot.changes() == []


class ByName(type):
    """Classes of one name say that they are equal."""

    def __eq__(cls, other):
        return cls.__name__ == other.__name__

    def __hash__(cls):
        return hash(cls.__name__)


def test_a_class_that_says_it_is_a_module_has_no_attributes_of_lightning():
    module, other = ByName("Same", (pl.LightningModule,), {})(), ByName("Same", (), {})()
    assert len({type(module), type(other)}) == 1
    assert is_no_state(module, "log")
    assert not is_no_state(other, "log")


def test_a_weak_proxy_has_the_attributes_of_its_object():
    metric = MeanMetric()
    assert is_no_state(weakref.proxy(metric), "update")
    assert not is_no_state(weakref.proxy(Plain()), "update")
