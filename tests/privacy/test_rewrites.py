"""Composite functions of torch, rewritten: a recording reaches their weights by rules, and gradients are the loop's."""

import pytest
import torch
from reference import Module, check
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.sources import Sources
from dp_lightning.privacy.gradients.vmap import unwrapped

B = 3


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inputs", ["xxx", "xyy", "xyz", "xxz"])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_with_every_pattern_of_inputs(need_weights, average, batch_first, inputs, bias):
    names, options = sorted(set(inputs)), {"need_weights": need_weights, "average_attn_weights": average}
    model = Module(
        lambda m, *given: m.inner(*(given[names.index(name)] for name in inputs), **options),
        inner=attention(batch_first=batch_first, bias=bias),
    )
    check_by_rules(model, *(torch.randn(B, 2, 5, 6) for _ in names))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
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
NETWORKS = [(kind, options) for kind in KINDS for options in OPTIONS]
NETWORKS += [("lstm", {"proj_size": 2} | options) for options in OPTIONS]


def recurrent(kind, options):
    """Takes an input and the tensors of a state, of which there may be none."""
    return Module(lambda m, x, *states: m.inner(x, as_argument(states)), inner=KINDS[kind](3, 4, **options))


def initial_states(module, *sequences):
    """The tensors of a state to begin with; ``sequences``: their number, none for an unbatched input."""
    count = module.num_layers * (1 + module.bidirectional)
    h = torch.randn(B, count, *sequences, module.proj_size or 4)
    return [h, torch.randn(B, count, *sequences, 4)] if isinstance(module, nn.LSTM) else [h]


def as_argument(states):
    """What a recurrent module takes: a pair, one tensor, or None."""
    return tuple(states) if len(states) == 2 else states[0] if states else None


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("sequences", [(), (2,)], ids=str)
def test_recurrent_networks(kind, options, with_state, sequences):
    model = recurrent(kind, options)
    x = torch.randn(B, *sequences, 5, 3) if model.inner.batch_first else torch.randn(B, 5, *sequences, 3)
    check_by_rules(model, x, *(initial_states(model.inner, *sequences) if with_state else []))


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences_of_lengths_that_the_examples_share(kind, options, with_state):
    model, sizes = recurrent(kind, options), torch.tensor([4, 3, 3, 1])
    packed = Module(lambda m, data, *states: m.inner(PackedSequence(data, sizes), *states), inner=model)
    check_by_rules(packed, torch.randn(B, 11, 3), *(initial_states(model.inner, 4) if with_state else []))


def test_packed_sequences_of_other_lengths_for_each_example_are_refused():
    def forward(m, data, sizes):
        state = (torch.zeros(1, 3, 4),) * 2
        return torch.lstm(data, sizes, state, m.inner._flat_weights, True, 1, 0.0, True, False)

    with pytest.raises(ModelError, match=r"lengths of a packed sequence differ.*padded input"):
        check(Module(forward, inner=nn.LSTM(3, 4)), loss, torch.randn(B, 6, 3), torch.tensor([[3, 2, 1]] * B))


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


CELLS = {
    "lstm_cell": nn.LSTMCell,
    "gru_cell": nn.GRUCell,
    "rnn_tanh_cell": nn.RNNCell,
    "rnn_relu_cell": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
def test_cells(kind, bias, with_state, leading):
    def forward(m, x, *states):
        return m.inner(x, m.inner(x, as_argument(states)))

    states = [torch.randn(B, *leading, 4) for _ in range(1 + (kind == "lstm_cell"))] if with_state else []
    check_by_rules(Module(forward, inner=CELLS[kind](3, 4, bias=bias)), torch.randn(B, *leading, 3), *states)
