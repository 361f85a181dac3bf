"""What a step may do under vmap: right against a loop over single examples, or refused with the fix."""

import functools
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from reference import gradients_by_loop
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients import sources
from dp_lightning.privacy.gradients.recording import Recording

B = 3


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def record(model, loss, *examples, **options):
    """Per-example gradients by name, and the recording."""
    found = {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def take(contribution):
        for name, gradients in contribution.formed().gradients.items():
            assert name not in found
            found[name] = gradients

    recording = Recording(trained, len(examples[0]), take, **options)
    recording.backward(recording.run(lambda *example: loss(model, *example), *examples))
    return found, recording


def check(model, loss, *examples, ways=None, rtol=1e-9, **options):
    """The gradients are those of the loop; ``examples``: (b, ...) each."""
    found, recording = record(model, loss, *examples, **options)
    expected = gradients_by_loop(model, lambda model, *example: loss(model, *example), *examples)
    assert set(found) == {name for name, gradients in expected.items() if gradients is not None}
    for name, gradients in found.items():
        torch.testing.assert_close(gradients, expected[name], rtol=rtol, atol=rtol / 1000, msg=name)
    if ways is not None:
        assert recording.methods == ways
    return recording


def squares(model, x):
    return model(x).square().mean()


class Module(nn.Module):
    """With parameters and a forward function that are given."""

    def __init__(self, function, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def randn(*shape):
    return torch.randn(*shape)


# Ways to reach a weight


LINEAR = nn.Linear(4, 5, bias=False)
PRODUCTS = {
    "F.linear": lambda m, x: F.linear(x, m.w),
    "T": lambda m, x: x @ m.w.T,
    "mT": lambda m, x: x @ m.w.mT,
    "t()": lambda m, x: torch.matmul(x, m.w.t()),
    "transpose": lambda m, x: x.matmul(m.w.transpose(0, 1)),
    "permute": lambda m, x: x @ m.w.permute(1, 0),
    "left": lambda m, x: m.w @ x.mT,
    "mm": lambda m, x: torch.mm(x, m.w.T),
    "mv": lambda m, x: torch.mv(m.w, x[0]),
    "addmm": lambda m, x: torch.addmm(m.w[:, 0], x, m.w.T),
    "einsum": lambda m, x: torch.einsum("ti,oi->to", x, m.w),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, dims=([1], [1])),
    "bmm": lambda m, x: torch.bmm(x[None], m.w.T[None])[0],
    "operator of torch.ops": lambda m, x: torch.ops.aten.linear(x, m.w, None),
    "overload of torch.ops": lambda m, x: torch.ops.aten.mm.default(x, m.w.T),
    "computed from it": lambda m, x: F.linear(x, m.w / m.w.norm(dim=1, keepdim=True)),
    "computed with a buffer": lambda m, x: F.linear(x, m.w * torch.arange(4.0)),
    "indexed": lambda m, x: F.linear(x, m.w[torch.tensor([4, 0, 0])]),
    "chunks": lambda m, x: F.linear(x, m.w[:2]) * F.linear(x, m.w[2:4]),
    "detached and not": lambda m, x: F.linear(x, m.w.detach()) * F.linear(x, m.w),
    "without gradient and with": lambda m, x: F.linear(x, m.w) * _without_gradient(F.linear, x, m.w),
    "twice": lambda m, x: F.linear(F.linear(x, m.w).tanh()[:, :4], m.w),
    "rule and copies": lambda m, x: F.linear(x, m.w) + (x.unsqueeze(1) * m.w).sum(2),
    "rule, copies and computed": lambda m, x: F.linear(x, m.w) + (x.unsqueeze(1) * m.w).sum(2) * F.linear(x, m.w**2),
    "penalty": lambda m, x: F.linear(x, m.w) + m.w.square().sum(),
    "weights alone": lambda m, x: m.w.square().sum(),
    "penalty alone": lambda m, x: m.w.square().sum() + 0 * x.sum(),
    "iterated": lambda m, x: torch.stack([(x * row).sum() for row in m.w]),
    "cast": lambda m, x: F.linear(x.float(), m.w.float()).double(),
    "functional_call": lambda m, x: torch.func.functional_call(LINEAR, {"weight": m.w}, (x,)),
    "no rows": lambda m, x: F.linear(x[:0], m.w).sum() + F.linear(x, m.w),
    "a number": lambda m, x: F.linear(x[0, :], m.w),
}


def _without_gradient(function, *arguments):
    with torch.no_grad():
        return function(*arguments)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_is_found_in_every_way_to_use_it(name):
    rtol = 1e-4 if name == "cast" else 1e-9  # it computes in float32
    check(Module(PRODUCTS[name], w=randn(5, 4)), squares, randn(B, 3, 4), rtol=rtol)


MODULES = {
    "tied": lambda: _tied(),
    "called twice": lambda: _twice(),
    "position table": lambda: Module(
        lambda m, x: m.a(x) + m.e(torch.arange(3)), a=nn.Linear(4, 4), e=nn.Embedding(3, 4)
    ),
    "class token": lambda: Module(lambda m, x: m.a(torch.cat([m.t, x])), a=nn.Linear(4, 2), t=randn(1, 4)),
    "temperature": lambda: Module(lambda m, x: m.a(x) * m.t.exp(), a=nn.Linear(4, 2), t=torch.tensor(0.3)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5, bias=False)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 5, bias=False)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)),
    "LoRA": lambda: _lora(),
    "ParameterDict": lambda: _dictionary(),
    "frozen weight": lambda: _frozen("weight"),
    "frozen bias": lambda: _frozen("bias"),
    "PReLU": lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5)),
    "bilinear": lambda: Module(lambda m, x: m.b(x, x.tanh()), b=nn.Bilinear(4, 4, 2)),
    "attention": lambda: Module(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(4, 2)),
    "frozen LSTM": lambda: nn.Sequential(
        nn.Linear(4, 4), Module(lambda m, x: m.l(x)[0], l=nn.LSTM(4, 4).requires_grad_(False))
    ),
    "GRU": lambda: Module(lambda m, x: m.l(x)[0], l=nn.GRU(4, 3, 2, bidirectional=True, batch_first=True)),
    "experts": lambda: _experts(),
    "in place": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)
    ),
    "in place on the first": lambda: Module(lambda m, x: m.a(x[0])[1:].mul_(2), a=nn.Linear(4, 5)),
    "convolution in place": lambda: Module(lambda m, x: m.c(x).relu_().sum(0), c=nn.Conv1d(3, 4, 2)),
}


def _tied():
    model = Module(lambda m, x: F.linear(m.a(x).tanh(), m.b.weight), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    model.b.bias = None
    return model


def _twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.LayerNorm(4), layer)


def _lora():
    def forward(m, x):
        return F.linear(x, m.base.weight + 0.5 * m.up @ m.down, m.base.bias)

    return Module(forward, base=nn.Linear(4, 5).requires_grad_(False), up=randn(5, 2), down=randn(2, 4))


def _dictionary():
    model = Module(lambda m, x: F.linear(x, m.d["w"], m.d["b"]) * m.l[0])
    model.d = nn.ParameterDict({"w": randn(5, 4), "b": randn(5)})
    model.l = nn.ParameterList([torch.tensor(0.4)])
    return model


def _frozen(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        getattr(layer, name).requires_grad_(False)
    return model


def _experts():
    def forward(m, x):
        weights, chosen = m.router(x).softmax(-1).topk(2, dim=-1)
        return torch.einsum("tki,tkoi,tk->to", x.unsqueeze(1).expand(-1, 2, -1), m.w[chosen], weights)

    return Module(forward, router=nn.Linear(4, 3), w=randn(3, 5, 4))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:There is a performance drop")
def test_modules_equal_the_loop(name):
    model = MODULES[name]()
    if name == "convolution in place":
        check(model, squares, randn(B, 2, 3, 6))
    else:
        check(model, squares, randn(B, 3, 4))


def test_parameters_of_one_example_alone_are_ordinary_gradients():
    check(nn.Linear(4, 5), squares, randn(1, 2, 4))


def test_a_parameter_that_is_not_used_has_no_contribution():
    model = Module(lambda m, x: m.a(x), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    found, recording = record(model, squares, randn(B, 4))
    assert set(found) == set(recording.methods) == {"a.weight", "a.bias"}


def test_the_way_of_each_parameter_is_told():
    model = Module(
        lambda m, x: F.linear(m.n(m.a(x)) + m.shift, m.w.tanh()),
        a=nn.Linear(4, 4),
        n=nn.LayerNorm(4),
        shift=randn(4),
        w=randn(3, 4),
    )
    check(
        model,
        squares,
        randn(B, 2, 4),
        ways={
            "a.weight": "formed",
            "a.bias": "formed",
            "n.weight": "by rule",
            "n.bias": "by rule",
            "shift": "one copy per example",
            "w": "pulled back",
        },
    )


def test_pull_backs_in_pieces_and_without_a_batching_rule_are_the_same(monkeypatch):
    model, x = _lora(), randn(B, 3, 4)
    monkeypatch.setattr(sources, "_PULLED", 2 * (5 * 2 + 2 * 4))
    check(model, squares, x)

    def without_rule(*arguments, is_grads_batched=False, **options):
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented")
        return grad(*arguments, **options)

    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", without_rule)
    found, _ = record(model, squares, x)
    monkeypatch.undo()
    expected = gradients_by_loop(model, squares, x)
    torch.testing.assert_close(found, {name: expected[name] for name in found})


def test_rules_and_copies_see_what_the_function_saw_before_a_change_in_place():
    def forward(m, x):
        h = m.a(x)
        y = h * m.s
        h.mul_(2)  # a product keeps its input: autograd tells
        return y + h

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        record(Module(forward, a=nn.Linear(4, 4), s=randn(4)), squares, randn(B, 3, 4))


def test_an_input_changed_after_it_was_recorded_is_refused():
    def forward(m, x):
        h = x * 1.0
        y = m.a(h)
        h.mul_(2.0)
        return y

    with pytest.raises(ModelError, match=r"a\.weight, a\.bias is changed in place"):
        record(Module(forward, a=nn.Linear(4, 4)), squares, randn(B, 3, 4))


def test_a_computed_weight_changed_after_its_use_is_refused():
    def forward(m, x):
        w = m.w * 1.0
        y = F.linear(x, w)
        w.mul_(2.0)
        return y + F.linear(x, w)

    with pytest.raises(ModelError, match="computed from w is changed in place after it was used"):
        record(Module(forward, w=randn(4, 4)), squares, randn(B, 3, 4))


def test_a_computed_weight_changed_before_its_use_is_right():
    def forward(m, x):
        w = m.w * 1.0
        w[0] = 0.0
        return F.linear(x, w.add_(m.w))

    check(Module(forward, w=randn(4, 4)), squares, randn(B, 3, 4))


# Losses and masks that ask for the numbers of tensors


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.7])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3, 2), (4,)])
def test_cross_entropy_with_class_weights_equals_torch(shape, smoothing, reduction):
    target = torch.randint(4, (B, *shape[:1], *shape[2:]) if len(shape) > 1 else (B,))
    if len(shape) > 1:
        target.view(B, -1)[:, 0] = -100

    def loss(model, x, y):
        value = F.cross_entropy(model(x), y, CLASS_WEIGHTS.to(x), label_smoothing=smoothing, reduction=reduction)
        return value.sum()

    model = Module(lambda m, x: x * m.s.view(-1, *[1] * (x.dim() - min(x.dim(), 2))), s=randn(4))
    check(model, loss, randn(B, *shape), target)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "variance", [lambda x: x.exp(), lambda x: x[..., 0].exp(), lambda x: x.exp()[:, :1], lambda x: 0.3]
)
def test_the_loss_of_a_normal_distribution_equals_torch(variance, reduction):
    def loss(model, x):
        h = model(x)
        return F.gaussian_nll_loss(h, x[:, :3], variance(h - 4), full=True, eps=1e-2, reduction=reduction).sum()

    check(nn.Linear(4, 3), loss, randn(B, 5, 4))


@pytest.mark.parametrize("value", [0.0, -math.inf, "row", "number"])
def test_an_assignment_by_mask_equals_torch(value):
    def forward(m, x):
        h = m.a(x)
        mask = h[:, 0] > 0 if value == "row" else h > 0
        h = h.clone()
        h[mask] = {"row": m.row, "number": m.row[0]}.get(value, value) if isinstance(value, str) else value
        return h.exp()

    check(Module(forward, a=nn.Linear(4, 3), row=randn(3)), squares, randn(B, 5, 4))


def test_grouped_products_of_experts_equal_the_loop():
    def forward(m, x):
        rows, ends = x[: len(x) // 2], torch.tensor([1, 1, 3], dtype=torch.int32)
        ends = (ends + 0 * x.sum().int()).int()
        return F.grouped_mm(rows, m.w, offs=ends)

    model, x = Module(forward, w=torch.randn(3, 8, 8, dtype=torch.float32)), torch.randn(B, 6, 8, dtype=torch.float32)
    found, _ = record(model, squares, x)
    expected = gradients_by_loop(model, squares, x)
    torch.testing.assert_close(found["w"], expected["w"], rtol=1e-5, atol=1e-6)


REFUSED = {
    "item": (
        lambda m, x: m.a(x) * m.a(x).sum().item(),
        r"test_recording\.py:\d+ .*numbers of an example are read.*torch\.where",
    ),
    "if": (lambda m, x: m.a(x) if x.sum() > 0 else m.a(-x), "numbers of an example are read"),
    "float": (lambda m, x: m.a(x) * float(x.sum()), "numbers of an example are read"),
    "format": (lambda m, x: m.a(x) if f"{x.sum():.1f}" else x, "numbers of an example are read"),
    "boolean index": (lambda m, x: m.a(x)[x[:, 0] > 0].mean(), "shape of a result depends.*masked_fill"),
    "assignment of a row for each": (lambda m, x: _assigned(m.a(x), x), "shape of a result depends"),
    "nonzero": (lambda m, x: m.a(x)[(x[:, 0] > 0).nonzero()].mean(), "shape of a result depends"),
    "numpy": (lambda m, x: m.a(torch.from_numpy(np.tanh(x.numpy()))), "memory of a tensor is read"),
    "tolist": (lambda m, x: m.a(torch.tensor(x.tolist())), "memory of a tensor is read"),
    "data": (lambda m, x: m.a(x.data), r"memory of a tensor is read.*x\.detach\(\)"),
    "BatchNorm": (lambda m, x: m.n(x), "BatchNorm in training mode.*batch_norm_to_group_norm"),
    "shared tensor": (lambda m, x: m.a(m.bank.copy_(x)), "written into a tensor that all examples share"),
    "buffer of random numbers": (lambda m, x: m.a(x + m.bank.normal_()), "drawn into a tensor"),
    "part of random numbers": (
        lambda m, x: m.a(x + torch.zeros(4)[1:].normal_().sum()),
        "drawn into a tensor.*rand_like",
    ),
    "computed weight": (lambda m, x: _written(m.a.weight * 1.0, x), "written into a tensor that all examples share"),
    "shared part": (lambda m, x: m.a(x + _written(torch.zeros(4), x)), "written into a tensor that all examples share"),
    "old autograd function": (lambda m, x: m.a(_Old.apply(x)), "no rule for single examples.*setup_context"),
    "autograd function without a rule": (
        lambda m, x: m.a(_NoRule.apply(x)),
        "no rule for single examples.*generate_vmap_rule",
    ),
    "checkpointing": (lambda m, x: checkpoint(m.a, x, use_reentrant=False), "checkpointing.*max_physical_batch_size"),
    "reentrant checkpointing": (
        lambda m, x: checkpoint(m.a, x, use_reentrant=True),
        "checkpointing.*max_physical_batch_size",
    ),
    "saved tensors": (lambda m, x: _with_saved_tensor_hooks(m.a, x), "[Hh]ooks on saved tensors"),
    "tensor hook": (lambda m, x: _hooked(m.a(x)), r"Tensor\.register_hook"),
    "retain_grad": (lambda m, x: _retained(m.a(x)), r"Tensor\.retain_grad"),
    "grad_fn": (lambda m, x: m.a(x) * (m.a(x).grad_fn is None), r"Tensor\.grad_fn"),
    "autograd.grad": (lambda m, x: torch.autograd.grad(m.a(x).sum(), m.a.weight)[0], r"torch\.autograd\.grad"),
    "autograd.backward": (lambda m, x: _ran_backward(m.a(x)), "backward"),
    "backward": (lambda m, x: m.a(x).sum().backward(), r"Tensor\.backward"),
    "torch.func.grad": (
        lambda m, x: m.a(torch.func.grad(lambda v: v.square().sum())(x)),
        "a transform of torch",
    ),
    "torch.func.vmap of a weight": (lambda m, x: torch.vmap(lambda v: m.a(v))(x), "a transform of torch"),
    "torch.func.jvp": (lambda m, x: torch.func.jvp(m.a, (x,), (x,))[1], "a transform of torch"),
    "foreign leaf": (lambda m, x: m.a(x) * torch.ones(5, requires_grad=True), "not a trained parameter"),
    "parameter in place": (lambda m, x: _in_place(m.a, x), r"changes the parameter 'a\.weight' in place \(mul_\)"),
    "parameter's data in place": (lambda m, x: _data_in_place(m.a, x), r"changes the parameter 'a\.weight' in place"),
    "parameter's data set": (lambda m, x: _data_set(m.a, x), r"changes the parameter 'a\.weight' in place"),
    "without a loss": (lambda m, x: x, "does not depend on any trained parameter"),
    "without gradient": (lambda m, x: _without_gradient(m.a, x), "does not depend on any trained parameter"),
    "max_norm": (lambda m, x: F.embedding(x[0].long().clamp(0, 2), m.table, max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (
        lambda m, x: F.embedding(x[0].long().clamp(0, 2), m.table, scale_grad_by_freq=True),
        "scale_grad",
    ),
}


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _NoRule(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _Generated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x.clamp_min(0) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * (x > 0) * scale, (gradient * x.clamp_min(0)).sum(0)


def _assigned(h, x):
    h = h.clone()
    h[h > 0] = x[0, :1].expand(5)
    return h


def _written(tensor, x):
    (tensor if tensor.requires_grad else tensor[1:]).add_(x[0, 1:].sum())
    return tensor


def _hooked(x):
    x.register_hook(lambda gradient: gradient * 2)
    return x


def _retained(x):
    x.retain_grad()
    return x


def _with_saved_tensor_hooks(function, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return function(x)


def _ran_backward(x):
    torch.autograd.backward(x.sum())
    return x


def _in_place(layer, x):
    with torch.no_grad():
        layer.weight.mul_(2)
    return layer(x)


def _data_in_place(layer, x):
    layer.weight.data.clamp_(-1, 1)
    return layer(x)


def _data_set(layer, x):
    layer.weight.data = layer.weight.detach() * 2
    return layer(x)


def _refusing(function):
    model = Module(function, a=nn.Linear(4, 5), n=nn.BatchNorm1d(4), table=randn(3, 5))
    model.register_buffer("bank", torch.zeros(3, 4))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_by_example_is_refused_with_the_fix(name):
    function, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        record(_refusing(function), squares, randn(B, 3, 4))


ATTENTION = {
    "plain": lambda q, k: F.scaled_dot_product_attention(q, k, k),
    "causal": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
    "scale": lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=2.0),
    "mask": lambda q, k: F.scaled_dot_product_attention(q, k, k, torch.ones(3, 3).tril().bool()),
    "mask by head": lambda q, k: F.scaled_dot_product_attention(q, k, k, torch.arange(18.0).view(2, 3, 3).sin()),
    "mask by example": lambda q, k: F.scaled_dot_product_attention(q, k, k, q[..., :1, :, :1].mT > 0),
    "mask with a gradient": lambda q, k: F.scaled_dot_product_attention(q, k, k, q @ k.mT),
    "mask of more dimensions": lambda q, k: F.scaled_dot_product_attention(q, k, k, torch.ones(1, 1, 3, 3).tril()),
    "constant key": lambda q, k: F.scaled_dot_product_attention(q, torch.ones(2, 3, 4), k),
    "constant query": lambda q, k: F.scaled_dot_product_attention(torch.ones(2, 5, 4), k, k),
    "fewer heads of keys": lambda q, k: F.scaled_dot_product_attention(
        q, k[..., :1, :, :], k[..., :1, :, :], enable_gqa=True
    ),
}


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_treats_the_rows_of_an_example_apart(name, lead):
    if name == "constant query" and lead:
        pytest.skip("torch broadcasts no query")
    if name == "mask of more dimensions" and len(lead) != 1:
        pytest.skip("the mask of a batch")
    model = Module(lambda m, x: ATTENTION[name](m.q(x), m.k(x)), q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check(model, squares, randn(B, *lead, 2, 3, 4))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_frozen_recurrent_layers_treat_the_rows_of_an_example_apart(kind, batch_first):
    def forward(m, x):
        output, state = m.l(m.a(x))
        last = state[0] if isinstance(state, tuple) else state
        return torch.cat([output.flatten(), m.l(x, state)[0].flatten(), last.flatten()])

    layer = getattr(nn, kind)(4, 3, 2, bidirectional=True, batch_first=batch_first).requires_grad_(False)
    check(Module(forward, a=nn.Linear(4, 4), l=layer), squares, randn(B, 2, 5, 4))


def test_packed_sequences_of_known_lengths_equal_the_loop():
    def forward(m, x):
        return m.l(nn.utils.rnn.PackedSequence(m.a(x), torch.tensor([2, 1])))[0].data

    model = Module(forward, a=nn.Linear(4, 4), l=nn.LSTM(4, 3).requires_grad_(False))
    check(model, squares, randn(B, 3, 4))


def test_gradients_of_several_uses_add_up_in_float32():
    source = sources.Source("w", torch.ones(2), {}, 0)
    for _ in range(2):
        source.add(torch.full((B, 2), 1 + 2.0**-8, dtype=torch.float64).to(torch.bfloat16))
    assert source.gradients.dtype == torch.float32


def test_what_is_no_fault_of_vmap_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(nn.Linear(5, 2), squares, randn(B, 4))
    with pytest.raises(KeyError):
        record(Module(lambda m, x: {}["missing"], a=nn.Linear(4, 2)), squares, randn(B, 4))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused(register):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    getattr(model[0], register)(lambda *arguments: None)
    with pytest.raises(ModelError, match="backward hook"):
        record(model, squares, randn(B, 3, 4))


def test_hooks_of_parameters_are_refused_and_forward_hooks_are_seen():
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: output * 3)
    check(model, squares, randn(B, 3, 4))
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match="'weight' has a hook"):
        record(model, squares, randn(B, 3, 4))


def test_a_parameter_inside_of_a_scripted_function_is_refused():
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = Module(lambda m, x: m.a(x) + m.inner(x), a=nn.Linear(4, 4))
    model.inner = scripted
    with pytest.raises(ModelError, match="scripted function"):
        record(model, squares, randn(B, 3, 4))


def test_a_gradient_that_reaches_a_parameter_unseen_is_refused_by_name():
    @torch.jit.script
    def add_to(x, y):
        return x.add_(y)

    def forward(m, x):
        h = m.a(x)
        add_to(h, m.shift)
        return h

    with pytest.raises(ModelError, match="reaches the parameter 'shift' without"):
        record(Module(forward, a=nn.Linear(4, 4), shift=randn(4)), squares, randn(B, 3, 4))


def test_autograd_functions_with_a_generated_rule_are_right():
    model = Module(lambda m, x: _Generated.apply(m.a(x), m.scale), a=nn.Linear(4, 5), scale=randn(5))
    check(model, squares, randn(B, 3, 4))


def test_a_vmap_over_indices_is_right():
    def forward(m, x):
        mask = torch.vmap(lambda i: torch.arange(3) <= i)(torch.arange(3))
        row = torch.vmap(lambda v: v.sum() * 2)(x)
        return m.a(x) * mask.sum(1, keepdim=True) * row.unsqueeze(1)

    check(Module(forward, a=nn.Linear(4, 5)), squares, randn(B, 3, 4))


# Tensors that are not of the step


class _Subclass(torch.Tensor):
    pass


UNSEEN = {
    "inner vmap": lambda x: torch.vmap(lambda row: row.square())(x),
    "scripted function": lambda x: _scripted(x),
    "subclass": lambda x: x.as_subclass(_Subclass),
    "inner jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
}


@torch.jit.script
def _scripted(x):
    return x * 2


@pytest.mark.parametrize("name", UNSEEN)
def test_a_tensor_that_no_mode_saw_being_made_is_of_this_batch(name):
    recording = check(Module(lambda m, x: m.a(UNSEEN[name](x)), a=nn.Linear(4, 5)), squares, randn(B, 3, 4))
    assert not recording.living()


CONSTANTS = {
    "closure": functools.partial(lambda table: table, randn(4)),
    "cache": functools.lru_cache(lambda: torch.arange(4.0)),
    "torch.Tensor": lambda: torch.Tensor([1.0, 2.0, 3.0, 4.0]),
    "numpy": lambda: torch.from_numpy(np.ones(4)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_may_come_from_anywhere(name):
    model = Module(lambda m, x: m.a(x * CONSTANTS[name]()), a=nn.Linear(4, 5))
    for _ in range(2):
        assert not check(model, squares, randn(B, 3, 4)).living()


KEPT = {
    "the example": lambda x: x,
    "detached": lambda x: x.detach(),
    "computed": lambda x: x.square(),
    "copied from an inner vmap": lambda x: torch.vmap(torch.sum)(x) * 1,
}
USED = {
    "in a function": lambda m, x, kept: m.a(x + kept.sum()),
    "in an inner vmap": lambda m, x, kept: m.a(x * torch.vmap(lambda row: row + kept.sum())(x)),
    "in an inner vmap over it": lambda m, x, kept: m.a(x * torch.vmap(torch.sum)(kept).sum()),
    "in an inner jvp": lambda m, x, kept: m.a(x * torch.func.jvp(lambda v: v.sin(), (kept,), (kept,))[1].sum()),
    "in an inner gradient": lambda m, x, kept: m.a(x * torch.func.grad(lambda v: v.square().sum())(kept).sum()),
}


def stale(recording):
    """The tensors of examples that are left after a batch, as the next one gets them."""
    return {id(tensor): weakref.ref(tensor) for tensor in recording.living()}


@pytest.mark.parametrize("use", USED)
@pytest.mark.parametrize("keep", KEPT)
def test_a_tensor_of_an_earlier_batch_is_refused(keep, use):
    kept = []

    def forward(m, x):
        if kept:
            return USED[use](m, x, kept[0])
        kept.append(KEPT[keep](x))
        return m.a(x)

    model = Module(forward, a=nn.Linear(4, 5))
    _, recording = record(model, squares, randn(B, 3, 4))
    gc.collect()
    assert any(made is kept[0] for made in recording.living())
    with pytest.raises(ModelError, match=r"shape \(.*\) of an earlier batch.*self\.log"):
        record(model, squares, randn(B, 3, 4), stale=stale(recording))


def test_what_is_overwritten_before_it_is_read_is_no_tensor_of_an_earlier_batch():
    class Model(nn.Linear):
        def forward(self, x):
            self.last = torch.randn_like(x)
            return super().forward(x + self.last)

    model = Model(4, 5)
    _, recording = record(model, squares, randn(B, 3, 4))
    before = stale(recording)
    assert before
    record(model, squares, randn(B, 3, 4), stale=before)


def test_the_loss_of_an_earlier_batch_is_refused():
    model, x, kept = nn.Linear(4, 5), randn(B, 3, 4), []

    def loss(model, x):
        kept.append(squares(model, x))
        return kept[0]

    _, recording = record(model, loss, x)
    with pytest.raises(ModelError, match="of an earlier batch"):
        record(model, loss, x, stale=stale(recording))


def test_a_step_that_keeps_nothing_leaves_no_tensor_behind():
    _, recording = record(_twice(), squares, randn(B, 3, 4))
    gc.collect()
    assert not recording.living()


def test_the_gradients_that_were_there_stay():
    model = nn.Linear(4, 4)
    model.weight.grad = randn(4, 4)
    before = model.weight.grad.clone()
    record(model, squares, randn(B, 3, 4))
    assert torch.equal(model.weight.grad, before)
    assert model.bias.grad is None


# State that is computed from weights alone


def test_spectral_norm_is_right_and_what_it_writes_can_be_undone():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = randn(B, 3, 4)
    found, recording = record(model, squares, x)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, state[name])]
    assert sorted(name.rpartition(".")[2] for name in changed) == ["_u", "_v"]
    for tensor, before in recording.written.values():
        tensor.copy_(before)
    assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())

    def loss(model, x):  # each example starts from the same vectors
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
        return squares(model, x)

    expected = gradients_by_loop(model, loss, x)
    torch.testing.assert_close(found, {name: expected[name] for name in found})


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_the_old_spectral_norm_is_right():
    model = nn.utils.spectral_norm(nn.Linear(4, 5))
    u, v, x = model.weight_u.clone(), model.weight_v.clone(), randn(B, 3, 4)
    found, recording = record(model, squares, x)
    assert len(recording.written) == 2

    def loss(model, x):
        model.weight_u.copy_(u)
        model.weight_v.copy_(v)
        return squares(model, x)

    expected = gradients_by_loop(model, loss, x)
    torch.testing.assert_close(found, {name: expected[name] for name in found})


WRITES = {
    "copy_": lambda m: m.teacher.copy_(0.9 * m.teacher + 0.1 * m.a.weight.detach()),
    "lerp_": lambda m: m.teacher.lerp_(m.a.weight.detach(), 0.1),
    "through data": lambda m: m.teacher.data.mul_(0.9),
    "through a view": lambda m: m.teacher.view(-1)[3:].zero_(),
    "setitem": lambda m: m.teacher.__setitem__(0, 1.0),
    "foreach": lambda m: torch._foreach_mul_([m.teacher], 0.5),
    "imul": lambda m: m.teacher.__imul__(2.0),
    "out": lambda m: torch.mul(m.teacher, 2.0, out=m.teacher),
    "fill twice": lambda m: m.teacher.add_(1).zero_(),
    "data set": lambda m: setattr(m.teacher, "data", m.teacher.detach() * 2),
    "operator": lambda m: torch.ops.aten.mul_.Scalar(m.teacher, 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_buffer_that_is_written_can_be_put_back(name):
    def forward(m, x):
        with torch.no_grad():
            WRITES[name](m)
        return m.a(x)

    model = Module(forward, a=nn.Linear(4, 4, bias=False))
    model.register_buffer("teacher", randn(4, 4))
    before = model.teacher.clone()
    _, recording = record(model, squares, randn(B, 3, 4))
    assert not torch.equal(model.teacher, before)
    ((tensor, value),) = recording.written.values()
    tensor.copy_(value)
    assert torch.equal(model.teacher, before)


def test_what_a_step_makes_is_written_freely():
    def forward(m, x):
        table = torch.zeros(4)
        table[1:] = 2.0
        return m.a(x * table.add_(m.b))

    model = Module(forward, a=nn.Linear(4, 4))
    model.register_buffer("b", randn(4))
    assert not check(model, squares, randn(B, 3, 4)).written


WRITTEN_BY_EXAMPLES = {
    "row": lambda m, x: _after(torch.zeros(3, 5), lambda t: t.__setitem__(1, m.a(x[0]))),
    "rows in a loop": lambda m, x: _after(torch.ones(3, 5), lambda t: [t.__setitem__(i, m.a(x[i])) for i in range(3)]),
    "total": lambda m, x: _after(torch.tensor(0.0), lambda t: t.__iadd__(m.a(x).square().sum())),
    "scatter": lambda m, x: _after(
        torch.zeros(3, 5), lambda t: t.scatter_(1, x.argmax(1, keepdim=True), m.a(x)[:, :1])
    ),
    "index_add": lambda m, x: _after(torch.zeros(4, 5), lambda t: t.index_add_(0, x.argmax(1), m.a(x))),
    "mask": lambda m, x: _after(torch.zeros(3, 5), lambda t: t.masked_fill_(m.a(x) > 0, 2.0)) * m.a(x),
    "assignment by mask": lambda m, x: _after(torch.zeros(3, 4), lambda t: t.__setitem__(x > 0, 2.0)) @ m.a.weight.T,
    "shared before": lambda m, x: m.a(x) * _after(torch.ones(3, 5), lambda t: t.add_(1).mul_(x[:, :1])),
}


def _after(tensor, change):
    change(tensor)
    return tensor


@pytest.mark.parametrize("name", WRITTEN_BY_EXAMPLES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_example_writes_into_a_tensor_that_the_step_has_made(name):
    check(Module(WRITTEN_BY_EXAMPLES[name], a=nn.Linear(4, 5)), squares, randn(B, 3, 4))


SEEN_ELSEWHERE = {
    "view": lambda t: t[0],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: torch.as_tensor(t.numpy()),
}


@pytest.mark.parametrize("name", SEEN_ELSEWHERE)
def test_a_tensor_whose_memory_was_seen_by_another_stays_shared(name):
    def forward(m, x):
        table = torch.zeros(3, 5)
        other = SEEN_ELSEWHERE[name](table)
        table[1] = m.a(x[0])
        return table.sum() + other.sum()

    with pytest.raises(ModelError, match="written into a tensor that all examples share"):
        record(Module(forward, a=nn.Linear(4, 5)), squares, randn(B, 3, 4))


def test_a_buffer_never_becomes_an_examples():
    def forward(m, x):
        m.bank.contiguous().add_(x)  # a function of the step has returned the buffer
        return m.a(m.bank)

    model = Module(forward, a=nn.Linear(4, 5))
    model.register_buffer("bank", torch.zeros(3, 4))
    with pytest.raises(ModelError, match="written into a tensor that all examples share"):
        record(model, squares, randn(B, 3, 4))
    assert not torch._C._functorch.is_batchedtensor(model.bank)


def test_a_parameter_may_be_set_to_the_values_that_it_has():
    def forward(m, x):
        m.a.weight.data = m.a.weight.data.to(m.a.weight.device)
        m.a.bias.data = m.a.bias.data.clone()
        return m.a(x)

    assert not check(Module(forward, a=nn.Linear(4, 4)), squares, randn(B, 3, 4)).written


# Randomness


def drawn(function, shape=(4, 50)):
    """What each example draws."""
    seen = []

    def forward(m, x):
        seen.append(function(x))
        return m.a(x).sum() + 0 * seen[0].sum()

    model = Module(forward, a=nn.Linear(shape[-1], 1))
    recording = Recording(dict(model.named_parameters()), 2, lambda contribution: None)
    values = []
    recording.run(
        lambda x: (model(x), values.append(torch._C._functorch.get_unwrapped(seen[0])))[0], torch.ones(2, *shape)
    )
    return values[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout1d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: torch.empty(4, 50).normal_() * torch.zeros(50).bernoulli_(0.5),
        lambda x: torch.empty(4, 50).bernoulli_(x / 2),
        lambda x: _after(torch.empty(4, 50), lambda t: t.uniform_()),
        lambda x: torch.rand(4, 50),
        lambda x: torch.randn_like(x),
        lambda x: x * torch.bernoulli(torch.full((4, 50), 0.5)),
        lambda x: x[:, torch.randperm(50)] * torch.randperm(50),
        lambda x: x.new_empty(4, 50).normal_(),
        lambda x: F.gumbel_softmax(x),
        lambda x: torch.distributions.Normal(x, x).rsample(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], torch.eye(4, 50)[None] + 0 * x, dropout_p=0.5),
    ],
)
def test_each_example_draws_its_own_random_numbers(function):
    first, second = drawn(function)
    assert not torch.equal(first, second)


def test_dropout_of_a_weight_is_drawn_for_each_example():
    model, seen = Module(lambda m, x: F.linear(x, F.dropout(m.w, 0.5)), w=torch.ones(6, 4)), {}
    recording = Recording(
        dict(model.named_parameters()), 2, lambda contribution: seen.update(contribution.formed().gradients)
    )
    recording.backward(recording.run(lambda x: model(x).sum(), torch.ones(2, 1, 4)))
    assert set(seen["w"].unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(*seen["w"])


# Types and memory formats


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_small_network_in_bfloat16_is_close_to_the_loop(channels_last, views):
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(72, 5)),
    )  # fmt: skip
    x = torch.randn(B, views, 3, 8, 8)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (B, views))
    found, expected = {}, gradients_by_loop(model.double(), squares, x.double())
    model.float()

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x)

    found, _ = record(model, loss, x)
    assert all(gradients.dtype == torch.float32 for name, gradients in found.items() if "parametrizations" in name)
    norm = torch.cat([g.flatten(1) for g in expected.values()], 1).norm()
    error = torch.cat([found[name].flatten(1) - g for name, g in ((n, e.flatten(1)) for n, e in expected.items())], 1)
    assert error.norm() < 2e-2 * norm


@pytest.mark.parametrize(
    "attempt", [lambda x: torch.linalg.cholesky(x @ x.mT - 100 * torch.eye(4)), lambda x: F.embedding(x.long(), x[:1])]
)
def test_an_error_that_the_step_catches_is_refused(attempt):
    linear = nn.Linear(4, 4)

    def loss(x):
        try:
            attempt(x)
        except Exception:
            return linear(x).sum()
        return linear(x).square().sum()

    with pytest.raises(ModelError, match="catches an error"):
        Recording(dict(linear.named_parameters()), 3, lambda found: None).run(loss, 100 * torch.randn(3, 2, 4))
