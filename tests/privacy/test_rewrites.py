"""Rewrites of composite functions: torch's values and gradients, alone and under vmap, by calls that a mode sees."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode

from dp_lightning.privacy.gradients import rewrites
from dp_lightning.privacy.gradients.rewrites import REWRITES


class Rewriting(TorchFunctionMode):
    """Calls the rewrite of each function that has one, and counts the calls that it sees."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.batched = set()  # whether input and weight of F.linear had an example dimension

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            self.batched.add(tuple(map(is_batchedtensor, args[:2])))
        rewrite, result = REWRITES.get(func), NotImplemented
        if rewrite is not None:
            with self:
                result = rewrite(*args, **kwargs)
        if result is NotImplemented:
            self.calls[func] += 1
            return func(*args, **kwargs)
        self.calls[rewrite] += 1
        return result


def tensors(output):
    """All floating-point tensors in nested tuples."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    return [] if output is None else [x for part in output for x in tensors(part)]


def differentiated(call, leaves):
    """The outputs of ``call`` and the gradients of a random linear function of them."""
    outputs = tensors(call())
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)
    return outputs, torch.autograd.grad(loss, leaves)


def assert_same(actual, expected):
    # Rounding errors of float64 are about 1e-15.
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def check(call, leaves, rewrite=None):
    """``call`` gives torch's outputs and gradients under the rewrites. Returns the calls that were seen."""
    expected = differentiated(call, leaves)
    with Rewriting() as mode:
        actual = differentiated(call, leaves)
    assert_same(actual, expected)
    assert rewrite is None or mode.calls[rewrite] > 0
    return mode.calls


def check_vmap(call, leaves, *inputs):
    """``call`` gives under vmap and the rewrites what torch gives for one example after the other.

    Each ``F.linear`` has an input of every example and a weight that all share.
    """

    def loop():
        outputs = [tensors(call(*example)) for example in zip(*inputs, strict=True)]
        return [torch.stack(column) for column in zip(*outputs, strict=True)]

    def mapped():
        with Rewriting() as mode:
            outputs = torch.func.vmap(lambda *example: tuple(tensors(call(*example))), randomness="different")(*inputs)
        assert mode.batched == {(True, False)}
        return outputs

    assert_same(differentiated(mapped, leaves), differentiated(loop, leaves))


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Attention


def attention(**options):
    module = nn.MultiheadAttention(6, 2, dtype=torch.float64, **options)
    for parameter in module.parameters():  # torch sets the biases to zero
        nn.init.normal_(parameter, std=0.5)
    return module


def mask_of(kind, *shape):
    """None, a boolean mask that shows the first key to every query, or numbers to be added."""
    if kind == "float":
        return torch.randn(shape, dtype=torch.float64)
    return (torch.rand(shape) < 0.4).index_fill(-1, torch.tensor([0]), False) if kind == "bool" else None


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("distinct", "linears"), [("xxx", 2), ("xyy", 3), ("xyz", 4), ("xxz", 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_with_every_pattern_of_inputs(need_weights, average, batch_first, distinct, linears, bias):
    module = attention(batch_first=batch_first, bias=bias)
    inputs = {name: randn(2, 5, 6) for name in distinct}
    arguments = [inputs[name] for name in distinct]
    calls = check(
        lambda: module(*arguments, need_weights=need_weights, average_attn_weights=average),
        [*module.parameters(), *inputs.values()],
        rewrites.multi_head_attention_forward,
    )
    assert calls[F.linear] == linears


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("sequences", [(), (5,)], ids=str)
@pytest.mark.parametrize("mask", ["", "bool", "float"])
def test_attention_under_vmap(need_weights, options, sequences, mask):
    module, shape = attention(**options), (4, 5, *sequences, 6)  # as many sequences as tokens, whichever come first
    x, y, padding = randn(*shape), randn(*shape), mask_of("bool", 4, *sequences, 5)
    shared = mask_of(mask, 5, 5)  # by the examples

    def call(x, y, padding):
        own = module(x, x, x, need_weights=need_weights, key_padding_mask=padding, attn_mask=shared)
        return own, module(y, x, x, need_weights=need_weights)

    check_vmap(call, [*module.parameters(), x, y], x, y, padding)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_features_of_other_numbers_under_vmap(need_weights):
    module = attention(kdim=4, vdim=3, add_bias_kv=True)
    inputs = [randn(4, 3, 2, 6), randn(4, 5, 2, 4), randn(4, 5, 2, 3)]
    check_vmap(lambda *each: module(*each, need_weights=need_weights), [*module.parameters(), *inputs], *inputs)


def test_dropped_attention_weights_are_scaled_and_differ_between_examples():
    module, x = attention(dropout=0.25, batch_first=True), randn(64, 10, 6)
    with Rewriting():
        dropped = torch.func.vmap(
            lambda x: module(x, x, x, average_attn_weights=False)[1], randomness="different"
        )(x[:1].expand(64, -1, -1))  # fmt: skip
        module.eval()
        kept = module(x[0], x[0], x[0], average_attn_weights=False)[1]
    zero = dropped == 0
    # 12,800 coins: the standard deviation of the fraction is 0.004.
    assert zero.double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert_same(dropped[~zero], (kept / 0.75).expand_as(dropped)[~zero])
    assert len(zero.flatten(1).unique(dim=0)) == 64


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


def network(kind, options):
    return KINDS[kind](3, 4, dtype=torch.float64, **options)


def initial_states(module, *sequences, examples=()):
    """The tensors of a state to begin with; ``sequences``: their number, none for an unbatched input."""
    count = module.num_layers * (1 + module.bidirectional)
    h = randn(*examples, count, *sequences, module.proj_size or 4)
    return [h, randn(*examples, count, *sequences, 4)] if isinstance(module, nn.LSTM) else [h]


def as_argument(states):
    """What a recurrent module takes: a pair, one tensor, or None."""
    return tuple(states) if len(states) == 2 else states[0] if states else None


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("lengths", [[5, 4, 4, 1], [2, 5, 1, 2]], ids=str)
def test_packed_sequences(kind, options, with_state, lengths):
    module, x = network(kind, options | {"batch_first": True}), randn(4, 5, 3)
    states = initial_states(module, 4) if with_state else []

    def call():
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        output, last = module(packed, as_argument(states))
        return output.data, last

    check(call, [*module.parameters(), x, *states], getattr(rewrites, kind))


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("sequences", [(), (2,)], ids=str)
def test_recurrent_networks_under_vmap(kind, options, with_state, sequences):
    module = network(kind, options)
    x = randn(3, *sequences, 5, 3) if module.batch_first else randn(3, 5, *sequences, 3)
    states = initial_states(module, *sequences, examples=(3,)) if with_state else []

    def call(x, *states):
        return module(x, as_argument(states))

    check_vmap(call, [*module.parameters(), x, *states], x, *states)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_under_vmap_share_their_lengths(kind):
    module, data, sizes = network(kind, {}), randn(3, 6, 3), torch.tensor([3, 2, 1])

    def call(data):
        output, last = module(PackedSequence(data, sizes))
        return output.data, last

    check_vmap(call, [*module.parameters(), data], data)
    state = (torch.zeros(1, 3, 4),) * (2 if kind == "lstm" else 1)
    with pytest.raises(NotImplementedError, match="padded input"):
        torch.func.vmap(
            lambda data, sizes: getattr(rewrites, kind)(
                data, sizes, state, module._flat_weights, True, 1, 0.0, True, False
            )
        )(data, sizes.expand(3, 3))


def test_dropout_between_layers():
    """Two layers that pass on what is positive show the dropout between them."""
    module = nn.RNN(20, 20, num_layers=2, nonlinearity="relu", bias=False, dropout=0.25, dtype=torch.float64)
    with torch.no_grad():
        for weights in module.all_weights:
            weights[0].copy_(torch.eye(20))
            weights[1].zero_()
    call, x = torch.func.vmap(lambda x: module(x)[0], randomness="different"), torch.ones(40, 10, 20).double()
    with Rewriting():
        dropped = call(x)
        module.eval()
        assert_same(call(x), x)
    zero = dropped == 0
    # 8,000 coins: the standard deviation of the fraction is 0.005.
    assert zero.double().mean().item() == pytest.approx(0.25, abs=0.025)
    assert_same(dropped[~zero], torch.full_like(dropped[~zero], 1 / 0.75))
    assert len(zero.flatten(1).unique(dim=0)) == 40


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
    cell, x = CELLS[kind](3, 4, bias=bias, dtype=torch.float64), randn(5, *leading, 3)
    states = [randn(5, *leading, 4) for _ in range(1 + (kind == "lstm_cell"))] if with_state else []

    def call(x, *states):
        return cell(x, cell(x, as_argument(states)))

    parameters = list(cell.parameters())
    calls = check(lambda: call(x[0], *(s[0] for s in states)), [*parameters, x, *states], getattr(rewrites, kind))
    assert calls[F.linear] == 4
    check_vmap(call, [*parameters, x, *states], x, *states)


# Matrix products

PRODUCTS = {
    "matmul": (lambda x, w, b: torch.matmul(x, w), rewrites.matmul),
    "method": (lambda x, w, b: x.matmul(other=w), rewrites.matmul),
    "vector on the left": (lambda x, w, b: x[0] @ w, rewrites.matmul),
    "weight on the left": (lambda x, w, b: w.T @ x.mT, rewrites.matmul),
    "mm": (lambda x, w, b: torch.mm(x, w), rewrites.matmul),
    "mv": (lambda x, w, b: torch.mv(w.T, x[0]), rewrites.matmul),
    "more dimensions": (lambda x, w, b: torch.stack([x, 2 * x]) @ w, rewrites.matmul),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), rewrites.addmm),
    "addmm of one number": (lambda x, w, b: torch.addmm(b[0], x, w), rewrites.addmm),
    "addmm of a weight": (lambda x, w, b: torch.addmm(b[:, None], w.T, x.T), rewrites.addmm),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_weight_are_linear_layers(name):
    call, rewrite = PRODUCTS[name]
    x, w, b = randn(3, 2, 4), randn(4, 5), randn(5)
    calls = check(lambda: call(x[0], w, b), [x, w, *([b] if "addmm" in name else [])], rewrite)
    assert calls[F.linear] == calls[rewrite]
    check_vmap(lambda x: call(x, w, b), [x, w, *([b] if "addmm" in name else [])], x)


def test_bilinear():
    module, x, y = nn.Bilinear(3, 4, 5, dtype=torch.float64), randn(3, 2, 3), randn(3, 2, 4)
    leaves = [*module.parameters(), x, y]
    assert check(lambda: module(x, y), leaves, rewrites.bilinear)[F.linear] == 1
    check_vmap(module, leaves, x, y)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: torch.addmm(b, x, w, beta=2),
        lambda x, w, b: torch.addmm(b, x, w, alpha=0.5),
        lambda x, w, b: torch.matmul(x[None], torch.stack([w, w])),
        lambda x, w, b: torch.mm(x, mat2=w),
    ],
)
def test_other_products_are_left_alone(call):
    x, w, b = randn(2, 4), randn(4, 5), randn(5)
    assert check(lambda: (call(x, w, b), b * 1), [x, w, b])[F.linear] == 0


def test_products_of_two_batched_matrices_are_left_alone():
    with Rewriting() as mode:
        torch.func.vmap(lambda x: x @ x.mT)(torch.randn(3, 2, 4))
    assert mode.calls[F.linear] == 0
