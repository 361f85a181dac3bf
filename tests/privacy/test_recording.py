"""What a step may do under vmap: right against a loop over single examples, or refused with the fix."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from reference import Module, check, record
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.transforms import v2

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients import sources
from dp_lightning.privacy.gradients.recording import Recording

B = 3
pytestmark = pytest.mark.usefixtures("float64")


def squares(model, x):
    return model(x).square().mean()


def randn(*shape):
    return torch.randn(*shape)


# Ways to reach a weight


LINEAR = nn.Linear(4, 5, bias=False)
PRODUCTS = {
    "F.linear": lambda m, x: F.linear(x, m.w),
    "T": lambda m, x: x @ m.w.T,
    "left": lambda m, x: m.w @ x.mT,
    "mv": lambda m, x: torch.mv(m.w, x[0]),
    "method": lambda m, x: x.matmul(other=m.w.T),
    "vector on the left": lambda m, x: x[0] @ m.w.T,
    "more dimensions": lambda m, x: torch.stack([x, 2 * x]) @ m.w.T,
    "two products of weights": lambda m, x: torch.matmul(x[None], torch.stack([m.w.T, m.w.T])),
    "einsum": lambda m, x: torch.einsum("ti,oi->to", x, m.w),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, dims=([1], [1])),
    "bmm": lambda m, x: torch.bmm(x[None], m.w.T[None])[0],
    "overload of torch.ops": lambda m, x: torch.ops.aten.mm.default(x, m.w.T),
    "computed from it": lambda m, x: F.linear(x, m.w / m.w.norm(dim=1, keepdim=True)),
    "computed with a buffer": lambda m, x: F.linear(x, m.w * torch.arange(4.0)),
    "indexed": lambda m, x: F.linear(x, m.w[torch.tensor([4, 0, 0])]),
    "detached and not": lambda m, x: F.linear(x, m.w.detach()) * F.linear(x, m.w),
    "without gradient and with": lambda m, x: F.linear(x, m.w) * _without_gradient(F.linear, x, m.w),
    "twice": lambda m, x: F.linear(F.linear(x, m.w).tanh()[:, :4], m.w),
    "rule, copies and computed": lambda m, x: F.linear(x, m.w) + (x.unsqueeze(1) * m.w).sum(2) * F.linear(x, m.w**2),
    "weights alone": lambda m, x: m.w.square().sum(),
    "no rows": lambda m, x: F.linear(x[:0], m.w).sum() + F.linear(x, m.w),
    "penalty": lambda m, x: F.linear(x, m.w) + m.w.square().sum(),
    "iterated": lambda m, x: torch.stack([(x * row).sum() for row in m.w]),
    "cast": lambda m, x: F.linear(x.float(), m.w.float()).double(),
    "functional_call": lambda m, x: torch.func.functional_call(LINEAR, {"weight": m.w}, (x,)),
}


# Products that are linear layers under another name, so that no example gets a copy of the weight.
BY_RULE = ["F.linear", "T", "left", "mv", "method", "vector on the left", "more dimensions", "twice", "indexed"]


def _without_gradient(function, *arguments):
    with torch.no_grad():
        return function(*arguments)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_weight_is_found_in_every_way_to_use_it(name):
    rtol = 1e-4 if name == "cast" else 1e-9  # it computes in float32
    with pytest.MonkeyPatch.context() as patch:
        if name in BY_RULE:
            patch.setattr(sources.Sources, "copies", None)
        check(Module(PRODUCTS[name], w=randn(5, 4)), squares, randn(B, 3, 4), rtol=rtol)


MODULES = {
    "position table": lambda: Module(
        lambda m, x: m.a(x) + m.e(torch.arange(3)), a=nn.Linear(4, 4), e=nn.Embedding(3, 4)
    ),
    "class token": lambda: Module(lambda m, x: m.a(torch.cat([m.t, x])), a=nn.Linear(4, 2), t=randn(1, 4)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5, bias=False)),
    "LoRA": lambda: _lora(),
    "in place": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)
    ),
    "InstanceNorm in place": lambda: _norm_in_place(nn.InstanceNorm1d(3, affine=True)),
    "GroupNorm in place": lambda: _norm_in_place(nn.GroupNorm(2, 4)),
    "LayerNorm in place": lambda: _norm_in_place(nn.LayerNorm(4)),
    "RMSNorm in place": lambda: _norm_in_place(nn.RMSNorm(4)),
    "convolution in place": lambda: Module(lambda m, x: m.c(x).relu_().sum(0), c=nn.Conv1d(3, 4, 2)),
}


def _norm_in_place(norm):
    return nn.Sequential(nn.Linear(4, 4), norm, nn.LeakyReLU(0.1, inplace=True))


def _lora():
    def forward(m, x):
        return F.linear(x, m.base.weight + 0.5 * m.up @ m.down, m.base.bias)

    return Module(forward, base=nn.Linear(4, 5).requires_grad_(False), up=randn(5, 2), down=randn(2, 4))


@pytest.mark.parametrize("name", MODULES)
def test_modules_equal_the_loop(name):
    model = MODULES[name]()
    if name == "convolution in place":
        check(model, squares, randn(B, 2, 3, 6))
    else:
        check(model, squares, randn(B, 3, 4))


def test_a_parameter_that_is_not_used_has_no_contribution():
    model = Module(lambda m, x: m.a(x), a=nn.Linear(4, 2), b=nn.Linear(4, 2))
    found, _ = record(model, squares, randn(B, 4))
    assert set(found) == {"a.weight", "a.bias"}


def test_pull_backs_in_pieces_are_the_same(monkeypatch):
    monkeypatch.setattr(sources, "_PULLED", 2 * (5 * 2 + 2 * 4))
    check(_lora(), squares, randn(B, 3, 4))


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


@pytest.mark.parametrize("value", [0.0, -math.inf, "row", "number"])
def test_an_assignment_by_mask_equals_torch(value):
    def forward(m, x):
        h = m.a(x)
        mask = h[:, 0] > 0 if value == "row" else h > 0
        h = h.clone()
        h[mask] = {"row": m.row, "number": m.row[0]}.get(value, value) if isinstance(value, str) else value
        return h.exp()

    check(Module(forward, a=nn.Linear(4, 3), row=randn(3)), squares, randn(B, 5, 4))


REFUSED = {
    "item": (
        lambda m, x: m.a(x) * m.a(x).sum().item(),
        r"test_recording\.py:\d+ .*numbers of an example are read.*torch\.where",
    ),
    "if": (lambda m, x: m.a(x) if x.sum() > 0 else m.a(-x), "numbers of an example are read"),
    "boolean index": (lambda m, x: m.a(x)[x[:, 0] > 0].mean(), "shape of a result depends.*masked_fill"),
    "assignment of a row for each": (lambda m, x: _assigned(m.a(x), x), "shape of a result depends"),
    "numpy": (lambda m, x: m.a(torch.from_numpy(np.tanh(x.numpy()))), "memory of a tensor is read"),
    "data": (lambda m, x: m.a(x.data), r"memory of a tensor is read.*x\.detach\(\)"),
    "BatchNorm": (lambda m, x: m.n(x), "BatchNorm in training mode.*batch_norm_to_group_norm"),
    "shared tensor": (lambda m, x: m.a(m.bank.copy_(x)), "written into a tensor that all examples share"),
    "buffer of random numbers": (lambda m, x: m.a(x + m.bank.normal_()), "drawn into a tensor"),
    "shared part": (lambda m, x: m.a(x + _written(torch.zeros(4), x)), "written into a tensor that all examples share"),
    "autograd function without a rule": (
        lambda m, x: m.a(_NoRule.apply(x)),
        "no rule for single examples.*generate_vmap_rule",
    ),
    "checkpointing": (lambda m, x: checkpoint(m.a, x, use_reentrant=False), "checkpointing.*max_physical_batch_size"),
    "saved tensors": (lambda m, x: _with_saved_tensor_hooks(m.a, x), "[Hh]ooks on saved tensors"),
    "tensor hook": (lambda m, x: _hooked(m.a(x)), r"Tensor\.register_hook"),
    "grad_fn": (lambda m, x: m.a(x) * (m.a(x).grad_fn is None), r"Tensor\.grad_fn"),
    "autograd.grad": (lambda m, x: torch.autograd.grad(m.a(x).sum(), m.a.weight)[0], r"torch\.autograd\.grad"),
    "autograd.backward": (lambda m, x: torch.autograd.backward(m.a(x).sum()), r"vmap cannot run this.*Rewrite it"),
    "backward": (lambda m, x: m.a(x).sum().backward(), r"Tensor\.backward"),
    "torch.func.grad": (
        lambda m, x: m.a(torch.func.grad(lambda v: v.square().sum())(x)),
        "a transform of torch",
    ),
    "foreign leaf": (lambda m, x: m.a(x) * torch.ones(5, requires_grad=True), "not a trained parameter"),
    "parameter in place": (lambda m, x: _in_place(m.a, x), r"changes the parameter 'a\.weight' in place \(mul_\)"),
    "parameter's data set": (lambda m, x: _data_set(m.a, x), r"changes the parameter 'a\.weight' in place"),
    "without a loss": (lambda m, x: x, "does not depend on any trained parameter"),
    "input changed later": (lambda m, x: _changed(m.a, x * 1.0), r"a\.weight, a\.bias is changed in place"),
    "computed weight changed later": (
        lambda m, x: _changed(lambda w: F.linear(x, w), m.a.weight * 1.0),
        r"computed from a\.weight is changed in place after it was used",
    ),
    "module with a backward hook": (lambda m, x: _with_backward_hook(m.a, x), "backward hook"),
    "scripted function": (lambda m, x: _added(m.a(x), m.a.bias), r"reaches the parameter 'a\.bias' without"),
    "max_norm": (lambda m, x: F.embedding(x[0].long().clamp(0, 2), m.table, max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (
        lambda m, x: F.embedding(x[0].long().clamp(0, 2), m.table, scale_grad_by_freq=True),
        "scale_grad",
    ),
}


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


def _with_saved_tensor_hooks(function, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return function(x)


def _changed(function, tensor):
    output = function(tensor)
    tensor.mul_(2.0)
    return output + function(tensor)


def _with_backward_hook(layer, x):
    layer.register_full_backward_hook(lambda *arguments: None)
    return layer(x)


@torch.jit.script
def _added(x, y):
    return x.add_(y)


def _in_place(layer, x):
    with torch.no_grad():
        layer.weight.mul_(2)
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
    "constant key": lambda q, k: F.scaled_dot_product_attention(q, torch.ones(2, 3, 4), k),
    "fewer heads of keys": lambda q, k: F.scaled_dot_product_attention(
        q, k[..., :1, :, :], k[..., :1, :, :], enable_gqa=True
    ),
}


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_treats_the_rows_of_an_example_apart(name, lead):
    model = Module(lambda m, x: ATTENTION[name](m.q(x), m.k(x)), q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check(model, squares, randn(B, *lead, 2, 3, 4))


# In each of them the shape of a result depends on the numbers of the example.
DYNAMIC = {
    "nonzero": lambda x: x[torch.nonzero(x[:, 0] > 0).squeeze(1)],
    "argwhere": lambda x: x[torch.argwhere(x[:, 0] > 0)],
    "where with a condition alone": lambda x: x[torch.where(x[:, 0] > 0)],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.round().unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].abs().long(), dim=0),
    "bincount": lambda x: (9 * x).abs().long().flatten().bincount() * x.sum(),
    "split by counts": lambda x: x.tensor_split(x[0].abs().long().clamp(0, 1))[0],
    "one_hot": lambda x: F.one_hot(x.abs().long()) * x.sum(),
    "to_sparse": lambda x: x.to_sparse().values(),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_shape_that_depends_on_numbers_is_refused_with_the_fix(name):
    with pytest.raises(ModelError, match=r"test_recording\.py:\d+ .*shape of a result depends.*one_by_one"):
        record(Module(lambda m, x: DYNAMIC[name](m.a(x)), a=nn.Linear(4, 5)), squares, 3 * randn(B, 3, 4))


CHANNELS_LAST = {"memory_format": torch.channels_last}
LAYOUTS = {
    "to": lambda x: x.to(**CHANNELS_LAST),
    "to with a type": lambda x: x.to(torch.float32, **CHANNELS_LAST).double(),
    "contiguous": lambda x: x.contiguous(**CHANNELS_LAST),
    "clone": lambda x: x.clone(**CHANNELS_LAST),
    "asked for": lambda x: x if x.is_contiguous(**CHANNELS_LAST) else x.contiguous(**CHANNELS_LAST),
    "zeros_like": lambda x: torch.zeros_like(x, **CHANNELS_LAST) + x,
    "three dimensions": lambda x: x[:, :, None].to(memory_format=torch.channels_last_3d)[:, :, 0],
    "a weight": lambda x: x * 1.0,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_memory_format_is_layout_alone(name):
    def forward(m, x):
        weight = m.c.weight.contiguous(**CHANNELS_LAST) if name == "a weight" else m.c.weight
        return F.conv2d(LAYOUTS[name](x), weight).flatten(1)

    check(Module(forward, c=nn.Conv2d(2, 3, 2).to(**CHANNELS_LAST)), squares, randn(B, 1, 2, 4, 4))


PACKED = {
    "lengths of an example": lambda m, x: _packed(m.lstm, x, x[:, 0, 0].abs().long().clamp(1, 4)),
    "projection": lambda m, x: m.projected(x)[0],
    "LSTM cell": lambda m, x: m.lstm_cell(x[:, 0])[0],
}


def _packed(lstm, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0].sum(1)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.RNNCell])
def test_cells_without_a_rule_equal_the_loop(kind):
    check(Module(lambda m, x: m.cell(x, m.cell(x)), cell=kind(4, 5)), squares, randn(B, 1, 4))


@pytest.mark.parametrize("name", PACKED)
def test_recurrent_networks_that_have_no_rule_are_refused_with_the_fix(name):
    layers = {"lstm": nn.LSTM(4, 5, batch_first=True), "projected": nn.LSTM(4, 5, batch_first=True, proj_size=2)}
    layers["lstm_cell"] = nn.LSTMCell(4, 5)
    with pytest.raises(ModelError, match=r"test_recording\.py:\d+ .*padded sequences.*one_by_one"):
        record(Module(PACKED[name], **layers), squares, randn(B, 1, 4, 4))


@pytest.mark.parametrize("kind", [v2.MixUp, v2.CutMix])
def test_what_mixes_examples_is_told_that_there_is_one(kind):
    def forward(m, x):
        mixed, _ = kind(num_classes=2)(x, torch.zeros(len(x), dtype=torch.long))
        return m.a(mixed.flatten(1))

    with pytest.raises(ModelError, match=r"test_recording\.py:\d+ .*MixUp and CutMix mix the examples"):
        record(Module(forward, a=nn.Linear(48, 2)), squares, randn(B, 1, 3, 4, 4))


def test_what_is_no_fault_of_vmap_keeps_its_text_and_is_told_its_line():
    with pytest.raises(ModelError, match=r"test_recording\.py:\d+ .*KeyError: 'missing' "):
        record(Module(lambda m, x: {}["missing"], a=nn.Linear(4, 2)), squares, randn(B, 4))


def test_a_text_model_trains_with_a_mask_of_four_dimensions_and_is_refused_with_one_of_two():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=16, **sizes)).eval()
    tokens, mask = torch.arange(B * 7).view(B, 7) % 29 + 1, torch.arange(7) < torch.arange(B)[:, None] + 2

    def loss(model, tokens, mask):
        return model(input_ids=tokens[None], attention_mask=mask[None]).logits.square().sum()

    check(model, loss, tokens, mask[:, None, None, :])
    with pytest.raises(ModelError, match="mask of four dimensions"):
        record(model, loss, tokens, mask.long())


def test_hooks_of_parameters_are_refused():
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match="'weight' has a hook"):
        record(model, squares, randn(B, 3, 4))


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


KEPT = {
    "detached": lambda x: x.detach(),
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


def test_the_gradients_that_were_there_stay():
    model = nn.Linear(4, 4)
    model.weight.grad = randn(4, 4)
    before = model.weight.grad.clone()
    record(model, squares, randn(B, 3, 4))
    assert torch.equal(model.weight.grad, before)
    assert model.bias.grad is None


# State that is computed from weights alone


WRITES = {
    "copy_": lambda m: m.teacher.copy_(0.9 * m.teacher + 0.1 * m.a.weight.detach()),
    "lerp_": lambda m: m.teacher.lerp_(m.a.weight.detach(), 0.1),
    "through data": lambda m: m.teacher.data.mul_(0.9),
    "through a view": lambda m: m.teacher.view(-1)[3:].zero_(),
    "foreach": lambda m: torch._foreach_mul_([m.teacher], 0.5),
    "out": lambda m: torch.mul(m.teacher, 2.0, out=m.teacher),
    "data set": lambda m: setattr(m.teacher, "data", m.teacher.detach() * 2),
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


WRITTEN_BY_EXAMPLES = {
    "row": lambda m, x: _after(torch.zeros(3, 5), lambda t: t.__setitem__(1, m.a(x[0]))),
    "scatter": lambda m, x: _after(
        torch.zeros(3, 5), lambda t: t.scatter_(1, x.argmax(1, keepdim=True), m.a(x)[:, :1])
    ),
    "mask": lambda m, x: _after(torch.zeros(3, 5), lambda t: t.masked_fill_(m.a(x) > 0, 2.0)) * m.a(x),
    "assignment by mask": lambda m, x: _after(torch.zeros(3, 4), lambda t: t.__setitem__(x > 0, 2.0)) @ m.a.weight.T,
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
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: torch.empty(4, 50).normal_() * torch.zeros(50).bernoulli_(0.5),
        lambda x: _after(torch.empty(4, 50), lambda t: t.uniform_()),
        lambda x: torch.rand(4, 50),
        lambda x: x * torch.bernoulli(torch.full((4, 50), 0.5)),
        lambda x: x[:, torch.randperm(50)] * torch.randperm(50),
        lambda x: torch.distributions.Normal(x, x).rsample(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], torch.eye(4, 50)[None] + 0 * x, dropout_p=0.5),
    ],
)
def test_each_example_draws_its_own_random_numbers(function):
    first, second = drawn(function)
    assert not torch.equal(first, second)


# Types and memory formats


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
