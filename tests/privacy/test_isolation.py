"""What escapes from an example may not come back; what follows from the weights moves on once for each logical step."""

import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy import PrivacyPlan, PrivateStep

N = 12


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])


def steps(module, *, size=4, num_steps=4, after_step=lambda: None, dataset=None, **settings):
    """Take every example in each step; returns the releases, without noise."""
    plan = PrivacyPlan(num_train=N, expected_batch_size=N, num_steps=num_steps, noise_multiplier=0.0, delta=1e-3)
    private = PrivateStep(module, module.loss, dataset or data(), plan=plan, max_physical_batch_size=size, **settings)
    releases = []
    for _ in range(num_steps):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        releases.append(torch.cat([p.grad.flatten() for p in private.parameters.values()]))
        after_step()
    return releases


class Queue(Net):
    """A memory bank of earlier batches, as contrastive losses have it."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def loss(self, batch):
        out = self.net(batch[0])
        value = F.cross_entropy(out, batch[1]) + sum((out - old).square().mean() for old in self.queue)
        self.queue = [out.detach()]
        return value


class InClosure(Net):
    def __init__(self):
        super().__init__()
        kept = []

        def loss(batch):
            value = F.cross_entropy(self.net(batch[0]), batch[1])
            if kept:
                value = value + (batch[0] - kept[-1]).square().mean()
            kept[:] = [batch[0]]
            return value

        self.loss = loss


@pytest.mark.parametrize("kind", [Queue, InClosure])
def test_a_tensor_of_an_earlier_physical_batch_is_refused_where_it_is_used(kind):
    with pytest.raises(ModelError, match="earlier batch"):
        steps(kind())


class Outputs(Net):
    """Lightning's own idiom for the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def loss(self, batch):
        value = super().loss(batch)
        self.outputs.append(value)
        return value


def test_a_list_of_losses_is_refused_after_the_next_step_with_its_place_and_the_cure():
    module = Outputs()
    with pytest.raises(ModelError, match=r"in Outputs\.outputs.*self\.log"):
        steps(module)


@pytest.mark.parametrize("size", [4, 12])
def test_a_list_that_is_cleared_after_each_step_passes(size):
    module = Outputs()
    steps(module, size=size, after_step=module.outputs.clear)


class LastDraw(Net):
    """Keeps its last random draw, as the augmentations of kornia do."""

    def loss(self, batch):
        self.drawn = torch.rand_like(batch[0])
        return F.cross_entropy(self.net(batch[0] + 0.01 * self.drawn), batch[1])


class LastSample(Net):
    """Keeps the last sample of its weights, as Bayesian layers do."""

    def loss(self, batch):
        self.weight = self.net.weight + 0.01 * torch.randn_like(self.net.weight)
        return F.cross_entropy(F.linear(batch[0], self.weight, self.net.bias), batch[1])


class Cycle(Net):
    """Makes a cycle of references around a tensor, which only Python's collector ends."""

    def loss(self, batch):
        held = {"out": self.net(batch[0])}
        held["itself"] = held
        return F.cross_entropy(held["out"], batch[1])


@pytest.mark.parametrize("kind", [LastDraw, LastSample, Cycle])
def test_what_the_next_step_overwrites_passes(kind):
    steps(kind())


def test_cycles_are_collected_once_and_not_in_each_step(monkeypatch):
    calls, collect = [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda *args: calls.append(1) or collect(*args))
    gc.disable()
    try:
        steps(Cycle(), num_steps=8)
    finally:
        gc.enable()
    assert len(calls) <= 2  # one for each shape: the output, and what softmax keeps of it


class Counter(Net):
    """Warms a loss up by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def loss(self, batch):
        self.step += 1
        return super().loss(batch) * self.step


class Late(Net):
    """Makes its counter in the first loss."""

    def loss(self, batch):
        self.step = getattr(self, "step", 0) + 1
        return super().loss(batch) * self.step


class Teacher(Net):
    """A teacher whose weights follow in the loss, as frozen parameters written in place."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(4, 3).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net.weight, 0.1)
        goal = self.teacher(batch[0]).softmax(-1)
        return F.cross_entropy(self.net(batch[0]), goal)


class Running(Net):
    """A buffer that is replaced by what follows from weights alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.ones(()))

    def loss(self, batch):
        self.norm = 0.9 * self.norm + 0.1 * self.net.weight.detach().norm()
        return super().loss(batch) * self.norm


@pytest.mark.parametrize("kind", [Counter, Late, Teacher, Running])
@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_state_from_weights_alone_advances_once_per_step_whatever_the_physical_batches(kind, mode):
    torch.manual_seed(0)
    one, several = steps(kind(), size=N, examples=mode), steps(kind(), size=3, examples=mode)
    for whole, pieces in zip(one, several, strict=True):
        # Sums of the same numbers in another order.
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_counter_counts_logical_steps(mode):
    module = Counter()
    steps(module, size=5, examples=mode)
    assert module.step == 4


def test_an_empty_draw_advances_the_state_and_adds_nothing():
    module = Counter()
    plan = PrivacyPlan(num_train=N, expected_batch_size=1, num_steps=3, noise_multiplier=0.0, delta=1e-3)
    private = PrivateStep(module, module.loss, data(), plan=plan)
    private._sampler.draw = lambda step: np.empty(0, dtype=np.int64)
    for _ in range(3):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        assert not any(parameter.grad.any() for parameter in module.parameters())
    assert module.step == 3


class Fails(Running):
    """Fails after it has written its state."""

    def loss(self, batch):
        self.step = getattr(self, "step", 0) + 1
        self.norm.add_(1.0)
        super().loss(batch)
        raise ArithmeticError


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_the_state_is_put_back_where_a_loss_fails(mode):
    module = Fails()
    norm = module.norm
    with pytest.raises(ArithmeticError):
        steps(module, examples=mode)
    assert module.norm is norm
    assert norm == 1
    assert not hasattr(module, "step")


class WithBatchNorm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def loss(self, batch):
        return F.cross_entropy(self.net(self.norm(batch[0].expand(2, 4) + torch.arange(2.0)[:, None])[:1]), batch[1])


def test_one_by_one_no_example_moves_a_buffer():
    module, other = WithBatchNorm(), WithBatchNorm()
    shifted = TensorDataset(data().tensors[0] + 100.0, data().tensors[1])
    steps(module, examples="one_by_one"), steps(other, dataset=shifted, examples="one_by_one")
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, dict(other.named_buffers())[name])


class LastInput(Net):
    """Weighs its loss by the input before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def loss(self, batch):
        value = super().loss(batch) * (1 + self.last.square().sum())
        self.last.copy_(batch[0][0].detach())
        return value


def test_one_by_one_what_an_example_writes_into_a_buffer_does_not_reach_the_next():
    one, other = (steps(kind(), num_steps=1, examples="one_by_one")[0] for kind in (LastInput, Net))
    assert torch.equal(one, other)


class HostDraws(Net):
    def loss(self, batch):
        return super().loss(batch) * (1 + 0.1 * np.random.rand())


def test_numbers_of_numpy_in_a_step_give_one_warning():
    with pytest.warns(UserWarning, match=r"numpy\.random or random.*torch") as found:
        steps(HostDraws())
    assert len(found) == 1


class Cached(Net):
    """Caches constants in the first loss."""

    def __init__(self):
        super().__init__()
        self.cache, self.scale = {}, None

    def loss(self, batch):
        if self.scale is None:
            self.scale = torch.full((4,), 0.5)
        scale = self.cache.setdefault("arange", torch.arange(4.0)) * self.scale
        return F.cross_entropy(self.net(batch[0] * scale), batch[1])


class SameData(Net):
    """Moves a weight to its device in each forward, as losses of pytorch-metric-learning do."""

    def loss(self, batch):
        self.net.weight.data = self.net.weight.data.to(batch[0].device)
        return super().loss(batch)


@pytest.mark.parametrize("kind", [Cached, SameData])
@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_constants_and_moves_pass(kind, mode):
    steps(kind(), examples=mode)


class Holds(Net):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("bank", tensor, persistent=False)


class HoldsList(Net):
    def __init__(self, tensor):
        super().__init__()
        self.bank = [tensor]


@pytest.mark.parametrize("kind", [Holds, HoldsList])
@pytest.mark.parametrize("around", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(N))])
def test_a_module_that_holds_the_training_tensors_is_refused(kind, around):
    dataset = data()
    with pytest.raises(ConfigurationError, match="bank of the module shares memory with the training set"):
        steps(kind(dataset.tensors[0][2:5]), dataset=around(dataset))
    steps(kind(dataset.tensors[0].clone()), dataset=around(dataset))


def test_a_data_set_may_hold_its_own_parts():
    dataset = data()
    dataset.first = Subset(dataset, range(3))
    steps(Net(), dataset=dataset, num_steps=1)
