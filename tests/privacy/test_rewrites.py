"""Composite functions of torch, rewritten: a recording reaches their weights by rules, and gradients are the loop's."""

import pytest
import torch
from reference import Module, check
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients import rewrites
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.sources import Sources
from dp_lightning.torch_internals import unwrapped

B = 3
pytestmark = pytest.mark.usefixtures("float64")


def tensors(output):
    """All tensors in nested tuples."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [] if output is None else [tensor for part in output for tensor in tensors(part)]


def loss(model, *inputs):
    return sum((output + 0.3).square().mean() for output in tensors(model(*inputs)))


def check_by_rules(model, *examples):
    """The gradients are those of the loop, and no example gets a copy of a weight, which ``bias_k`` is not."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(model.inner, "bias_k", None) is None:
            patch.setattr(Sources, "copies", None)
        check(model, loss, *examples, rtol=1e-8)


def outputs_of(model, x):
    """What a recording gets out of a module for each of the examples ``x``."""
    kept = []

    def step(x):
        kept.append(unwrapped(output := model(x)))
        return output.sum()

    Recording(dict(model.named_parameters()), len(x), lambda contribution: None).run(step, x)
    return kept[0].detach()


# Attention


def attention(**options):
    module = nn.MultiheadAttention(6, 2, **options)
    for parameter in module.parameters():  # torch sets the biases to zero
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("inputs", ["xxx", "xyy", "xyz", "xxz"])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_with_every_pattern_of_inputs(need_weights, inputs, bias):
    names, options = sorted(set(inputs)), {"need_weights": need_weights, "average_attn_weights": bias}
    model = Module(
        lambda m, *given: m.inner(*(given[names.index(name)] for name in inputs), **options), inner=attention(bias=bias)
    )
    check_by_rules(model, *(torch.randn(B, 2, 5, 6) for _ in names))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("sequences", [(), (5,)], ids=str)  # as many sequences as tokens, whichever come first
@pytest.mark.parametrize("mask", ["", "bool", "float"])
def test_masks_of_attention(need_weights, options, sequences, mask):
    def hidden(*shape):
        """Shows the first key to every query."""
        return (torch.rand(shape) < 0.4).index_fill(-1, torch.tensor([0]), False)

    shared = {"": None, "bool": hidden(5, 5), "float": torch.randn(5, 5)}[mask]  # by the examples

    def forward(m, x, padding):
        return m.inner(x, x, x, need_weights=need_weights, key_padding_mask=padding, attn_mask=shared)

    model = Module(forward, inner=attention(**options))
    check_by_rules(model, torch.randn(B, 5, *sequences, 6), hidden(B, *sequences, 5))


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_features_of_other_numbers(need_weights):
    model = Module(
        lambda m, *given: m.inner(*given, need_weights=need_weights), inner=attention(kdim=4, vdim=3, add_bias_kv=True)
    )
    check_by_rules(model, torch.randn(B, 3, 2, 6), torch.randn(B, 5, 2, 4), torch.randn(B, 5, 2, 3))


def check_dropped(dropped, kept):
    """A quarter is dropped, the rest is scaled, and each of 40 examples has draws of its own."""
    zero = dropped == 0
    # At least 8,000 coins: the standard deviation of the fraction is at most 0.005.
    assert zero.double().mean().item() == pytest.approx(0.25, abs=0.025)
    torch.testing.assert_close(dropped[~zero], (kept / 0.75).expand_as(dropped)[~zero])
    assert len(zero.flatten(1).unique(dim=0)) == 40


def test_dropped_attention_weights_are_scaled_and_differ_between_examples():
    inner, x = attention(dropout=0.25, batch_first=True), torch.randn(10, 6)
    model = Module(lambda m, x: m.inner(x, x, x, average_attn_weights=False)[1], inner=inner)
    check_dropped(outputs_of(model, x.expand(40, -1, -1)), model.eval()(x).detach())


# Recurrent networks

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = [
    {},
    {"bias": False},
    {"batch_first": True, "num_layers": 2},
    {"bidirectional": True, "bias": False},
    {"bidirectional": True, "num_layers": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_networks(kind, options):
    """One sequence without a state, and as many sequences as time steps, whichever come first, with one."""
    inner = KINDS[kind](3, 4, **options)
    check_by_rules(Module(lambda m, x: m.inner(x), inner=inner), torch.randn(B, 5, 3))
    states = torch.randn(2, B, inner.num_layers * (1 + inner.bidirectional), 5, 4)
    model = Module(lambda m, x, h, c: m.inner(x, (h, c) if kind == "lstm" else h), inner=inner)
    check_by_rules(model, torch.randn(B, 5, 5, 3), *states)


REFUSED = {
    "cell": (lambda: nn.LSTMCell(3, 4), lambda m, x: m.inner(x)[0]),
    "projection": (lambda: nn.LSTM(3, 4, proj_size=2), lambda m, x: m.inner(x)[0]),
    "packed": (lambda: nn.LSTM(3, 4), lambda m, x: m.inner(PackedSequence(x, torch.tensor([3, 2])))[0].data),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_rewritten_is_refused_with_the_fix(name):
    make, forward = REFUSED[name]
    with pytest.raises(ModelError, match="one_by_one"):
        check(Module(forward, inner=make()), loss, torch.randn(B, 5, 3))


def test_dropout_between_layers():
    """Two layers that pass on what is positive show the dropout between them."""
    inner = nn.RNN(20, 20, num_layers=2, nonlinearity="relu", bias=False, dropout=0.25)
    with torch.no_grad():
        for weights in inner.all_weights:
            weights[0].copy_(torch.eye(20))
            weights[1].zero_()
    model, x = Module(lambda m, x: m.inner(x)[0], inner=inner), torch.ones(40, 10, 20)
    check_dropped(outputs_of(model, x), x)
    assert torch.equal(outputs_of(model.eval(), x), x)


# Pooling


@pytest.mark.parametrize("options", [(2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0), (1, 2), True)], ids=str)
@pytest.mark.parametrize("shape", [(4, 7, 8), (2, 5, 6, 9)], ids=str)
def test_pooling_takes_the_first_of_equal_numbers(monkeypatch, options, shape):
    monkeypatch.setattr(rewrites, "examples_at_a_time", lambda numbers, device: 2)
    model = Module(lambda m, x: F.max_pool2d(x * m.scale, *options), scale=torch.ones(shape))
    x = torch.randint(3, (B, *shape)).double()
    check(model, lambda m, x: (h := m(x)).flatten() @ torch.arange(1.0, 1 + h.numel()), x)
    x[0, ..., 1, 2] = torch.nan
    expected = torch.stack([model(row) for row in x]).detach()
    monkeypatch.setattr(torch, "max_pool2d", None)  # the rewrite needs the places alone
    torch.testing.assert_close(outputs_of(model, x), expected, rtol=0, atol=0, equal_nan=True)
