"""What escapes from an example may not come back; what follows from the weights moves on once for each logical step."""

from functools import partial

import numpy as np
import pytest
import torch
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy import PrivateStep

N = 12
MODES = ["together", "one_by_one"]


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)


def plain(net, batch):
    return F.cross_entropy(net.net(batch[0]), batch[1])


class Net(nn.Module):
    """A linear layer with a loss that is given, and attributes that the loss uses."""

    def __init__(self, loss=plain, buffers=(), **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss = nn.Linear(4, 3), partial(loss, self)
        for name, value in dict(buffers).items():
            self.register_buffer(name, value)
        for name, value in attributes.items():
            setattr(self, name, value)


def steps(module, *, size=4, num_steps=4, after_step=lambda: None, dataset=None, **settings):
    """Take every example in each step; returns the releases, without noise."""
    settings = {"max_physical_batch_size": size, "plan": plan_of(N, num_steps=num_steps), **settings}
    private = PrivateStep(module, module.loss, dataset or data(), **settings)
    releases = []
    for _ in range(num_steps):
        releases.append(released(private))
        after_step()
    return releases


# Tensors of examples that are kept


def queue(net, batch):
    """A memory bank of earlier batches, as contrastive losses have it."""
    out = net.net(batch[0])
    value = F.cross_entropy(out, batch[1]) + sum((out - old).square().mean() for old in net.kept)
    net.kept = [out.detach()]
    return value


def inputs(net, batch):
    value = plain(net, batch)
    if net.kept:
        value = value + (batch[0] - net.kept[-1]).square().mean()
    net.kept[:] = [batch[0]]
    return value


@pytest.mark.parametrize("loss", [queue, inputs])
def test_a_tensor_of_an_earlier_physical_batch_is_refused_where_it_is_used(loss):
    with pytest.raises(ModelError, match="earlier batch"):
        steps(Net(loss, kept=[]))


def outputs(net, batch):
    """Lightning's own idiom for the end of an epoch."""
    net.outputs.append(plain(net, batch))
    return net.outputs[-1]


def test_a_list_of_losses_is_refused_after_the_next_step_with_its_place_and_the_cure():
    with pytest.raises(ModelError, match=r"in Net\.outputs.*self\.log"):
        steps(Net(outputs, outputs=[]))


def test_a_list_that_is_cleared_after_each_step_passes():
    module = Net(outputs, outputs=[])
    steps(module, after_step=module.outputs.clear)


def last_draw(net, batch):
    """Keeps its last random draw, as the augmentations of kornia do."""
    net.drawn = torch.rand_like(batch[0])
    return F.cross_entropy(net.net(batch[0] + 0.01 * net.drawn), batch[1])


def last_sample(net, batch):
    """Keeps the last sample of its weights, as Bayesian layers do."""
    net.weight = net.net.weight + 0.01 * torch.randn_like(net.net.weight)
    return F.cross_entropy(F.linear(batch[0], net.weight, net.net.bias), batch[1])


def cycle(net, batch):
    """Makes a cycle of references around a tensor, which only Python's collector ends."""
    held = {"out": net.net(batch[0])}
    held["itself"] = held
    return F.cross_entropy(held["out"], batch[1])


# State that follows from the weights


def counter(net, batch):
    """Warms a loss up by the number of its calls; the first one makes the counter."""
    net.step = getattr(net, "step", 0) + 1
    return plain(net, batch) * net.step


def teacher(net, batch):
    """A teacher whose weights follow in the loss, as frozen parameters written in place."""
    with torch.no_grad():
        net.teacher.weight.lerp_(net.net.weight, 0.1)
    return F.cross_entropy(net.net(batch[0]), net.teacher(batch[0]).softmax(-1))


def running(net, batch):
    """A buffer that is replaced by what follows from weights alone."""
    net.norm = 0.9 * net.norm + 0.1 * net.net.weight.detach().norm()
    return plain(net, batch) * net.norm


def spectral(norm):
    """The vectors of a spectral norm, as buffers written in place."""
    net = Net()
    net.net = norm(net.net)
    return net


STATES = {
    "spectral norm": lambda: spectral(nn.utils.parametrizations.spectral_norm),
    "old spectral norm": lambda: spectral(nn.utils.spectral_norm),
    "counter": lambda: Net(counter, step=0),
    "late": lambda: Net(counter),
    "teacher": lambda: Net(teacher, teacher=nn.Linear(4, 3).requires_grad_(False)),
    "buffer": lambda: Net(running, {"norm": torch.ones(())}),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("mode", MODES)
def test_state_from_weights_alone_advances_once_per_step_whatever_the_physical_batches(name, mode):
    def releases(size):
        torch.manual_seed(1)  # a teacher's first weights are not those of its student
        return steps(STATES[name](), size=size, examples=mode)

    for whole, pieces in zip(releases(N), releases(3), strict=True):
        # Sums of the same numbers in another order.
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_counter_counts_logical_steps(mode):
    module = Net(counter, step=0)
    steps(module, size=5, examples=mode)
    assert module.step == 4


def test_an_empty_draw_advances_the_state_and_adds_nothing():
    module = Net(counter, step=0)
    private = PrivateStep(module, module.loss, data(), plan=plan_of(N, expected_batch_size=1))
    private._sampler.draw = lambda step: np.empty(0, dtype=np.int64)
    for _ in range(3):
        assert not released(private).any()
    assert module.step == 3


def failing(net, batch):
    """Fails after it has written its state."""
    net.norm.add_(1.0)
    counter(net, batch)
    running(net, batch)
    raise ArithmeticError


@pytest.mark.parametrize("mode", MODES)
def test_the_state_is_put_back_where_a_loss_fails(mode):
    module = Net(failing, {"norm": torch.ones(())})
    norm = module.norm
    with pytest.raises(ModelError, match="ArithmeticError"):
        steps(module, examples=mode)
    assert module.norm is norm
    assert norm == 1
    assert not hasattr(module, "step")


def normalized(net, batch):
    return F.cross_entropy(net.net(net.norm(batch[0].expand(2, 4) + torch.arange(2.0)[:, None])[:1]), batch[1])


def test_one_by_one_no_example_moves_a_buffer():
    module, other = (Net(normalized, norm=nn.BatchNorm1d(4)) for _ in range(2))
    shifted = TensorDataset(data().tensors[0] + 100.0, data().tensors[1])
    steps(module, examples="one_by_one"), steps(other, dataset=shifted, examples="one_by_one")
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, dict(other.named_buffers())[name])


def weighed_by_the_last(net, batch):
    value = plain(net, batch) * (1 + net.last.square().sum())
    net.last.copy_(batch[0][0].detach())
    return value


def test_one_by_one_what_an_example_writes_into_a_buffer_does_not_reach_the_next():
    modules = Net(weighed_by_the_last, {"last": torch.zeros(4)}), Net()
    one, other = (steps(module, num_steps=1, examples="one_by_one")[0] for module in modules)
    assert torch.equal(one, other)


def test_numbers_of_numpy_in_a_step_give_one_warning():
    with pytest.warns(UserWarning, match=r"numpy\.random or random.*torch") as found:
        steps(Net(lambda net, batch: plain(net, batch) * (1 + 0.1 * np.random.rand())))
    assert len(found) == 1


def cached(net, batch):
    """Caches constants in the first loss."""
    if net.scale is None:
        net.scale = torch.full((4,), 0.5)
    scale = net.cache.setdefault("arange", torch.arange(4.0)) * net.scale
    return F.cross_entropy(net.net(batch[0] * scale), batch[1])


def moved(net, batch):
    """Moves a weight to its device in each forward pass, as losses of pytorch-metric-learning do."""
    net.net.weight.data = net.net.weight.data.to(batch[0].device)
    return plain(net, batch)


@pytest.mark.parametrize("loss", [last_draw, last_sample, cycle, cached, moved])
@pytest.mark.parametrize("mode", MODES)
def test_what_the_next_step_overwrites_constants_and_moves_pass(loss, mode):
    steps(Net(loss, cache={}, scale=None), examples=mode)


# Tensors of the training set in the module

HOLDERS = {"buffer": lambda tensor: Net(buffers={"bank": tensor}), "list": lambda tensor: Net(bank=[tensor])}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("around", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(N))])
def test_a_module_that_holds_the_training_tensors_is_refused(kind, around):
    dataset = data()
    with pytest.raises(ConfigurationError, match="bank of the module shares memory with the training set"):
        steps(HOLDERS[kind](dataset.tensors[0][2:5]), dataset=around(dataset))
    steps(HOLDERS[kind](dataset.tensors[0].clone()), dataset=around(dataset))
