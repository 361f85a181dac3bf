"""Modules that stand, or are used, where the gradient engine might not expect it: right, or refused by name."""

import pytest
import timm
import torch
from reference import clipped_sum_by_loop, relative_error
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy import ClipPlan, clipped_gradient_sum

PLANS = [ClipPlan.flat(max_grad_norm=0.5), ClipPlan.per_layer(max_grad_norm=0.5)]


def squares(output, target):
    return output.square().flatten(1).sum(1).mean()


def check(model, x, plan):
    sums, norms = clipped_gradient_sum(model, squares, x, torch.zeros(len(x)), clip_plan=plan)
    expected, expected_norms = clipped_sum_by_loop(model, x, torch.zeros(len(x)), plan, squares)
    assert relative_error(sums, expected) < 1e-5
    expected_norms = expected_norms[:, 0] if plan.kind == "flat" else expected_norms
    torch.testing.assert_close(norms.double(), expected_norms, rtol=1e-5, atol=0)


class Tied(nn.Module):
    """A parameter of the module that is also a layer's weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.shift = self.inner.weight

    def forward(self, x):
        return self.inner(x + self.shift)


class Attention(nn.Module):
    """Trains what the attention of torch uses without calling it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inner.in_proj_weight.requires_grad_(False)
        self.inner.in_proj_bias.requires_grad_(False)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Inside(nn.Module):
    """Without a rule as a whole; a layer of it is called from outside too."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.layer(x * self.scale)


class Shifted(nn.Module):
    """With a parameter of its own, of which copies stand in."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return self.linear(x) + self.shift


class Around(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner, self.layer = Inside(layer), layer

    def forward(self, x):
        return self.layer(self.inner(x).tanh())


def twice():
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(nn.Tanh(), layer))


def hooked():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    return model


def repadded(before, after):
    conv = nn.Conv2d(2, 3, 3, padding=before)
    conv.padding = after
    return conv


@pytest.mark.parametrize("plan", PLANS, ids=["flat", "per-layer"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (twice, (6,)),
        (hooked, (6,)),
        (Tied, (6,)),
        (Attention, (4, 6)),
        (lambda: Around(nn.Linear(6, 6)), (6,)),
        (lambda: Around(Shifted()), (6,)),
        (lambda: repadded(0, (1, 2)), (2, 6, 6)),
        (lambda: repadded(1, (0, 0)), (2, 6, 6)),
        (lambda: nn.ConvTranspose1d(4, 6, 4, stride=1, padding=1, dilation=3, output_padding=2), (4, 70)),
    ],
    ids=[
        "one module at two places",
        "a hook",
        "tied",
        "attention",
        "inside",
        "inside with copies",
        "more padding",
        "less padding",
        "output padding",
    ],
)
@pytest.mark.filterwarnings("ignore:No gradient rule")
def test_the_clipped_sum_equals_the_loop(build, shape, plan):
    torch.manual_seed(0)
    check(build(), torch.randn(5, *shape), plan)


def test_labels_without_a_second_dimension_are_embedded():
    torch.manual_seed(0)
    embedding, labels = nn.Embedding(7, 4), torch.tensor([3, 0, 3, 6])
    sums, norms = clipped_gradient_sum(
        embedding, squares, labels, torch.zeros(4), clip_plan=ClipPlan.flat(max_grad_norm=1e9)
    )
    squares(embedding(labels), None).mul(4).backward()
    torch.testing.assert_close(sums["weight"], embedding.weight.grad)
    torch.testing.assert_close(norms, 2 * embedding(labels).norm(dim=1))


def test_the_sums_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))
        for plan in PLANS:
            check(model, torch.randn(4, 2, 6), plan)
    finally:
        torch.set_default_dtype(torch.float32)


class Scaled(nn.Module):
    """Without a rule, and called with a tensor that does not belong to the examples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, scale):
        return F.linear(x * scale, self.weight)


class WithScale(nn.Module):
    def __init__(self, *, scale_first=False):
        super().__init__()
        self.inner, self.scale_first = Scaled(), scale_first
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x):
        return self.inner(self.scale, x) if self.scale_first else self.inner(x, self.scale)


class WithTable(nn.Module):
    def __init__(self, inner, rows):
        super().__init__()
        self.inner = inner
        self.register_buffer("table", torch.randn(rows, 8))

    def forward(self, x):
        return self.inner(x, self.table)


class Looks(nn.Module):
    """Takes from all rows of a table, and can from one, but for the deviation of one row."""

    def __init__(self, *, standardize=False):
        super().__init__()
        self.weight, self.standardize = nn.Parameter(0.1 * torch.randn(8, 8)), standardize

    def forward(self, x, table):
        if self.standardize:
            table = (table - table.mean(0)) / table.std(0)
        return (x @ self.weight @ table.T).softmax(-1) @ table


class Adds(nn.Module):
    """Linear in the mean of a table, or in one of its rows."""

    def __init__(self, row=None):
        super().__init__()
        self.weight, self.row = nn.Parameter(torch.randn(8, 8)), row

    def forward(self, x, table):
        return x + (table.mean(0) if self.row is None else table[torch.tensor(self.row)]) @ self.weight


class Masked(nn.Module):
    def __init__(self, length, project):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.project = nn.Linear(6, 6) if project else nn.Identity()
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())

    def forward(self, x):
        return self.inner(x, self.project(x), x, attn_mask=self.mask, need_weights=False)[0]


class Drops(nn.Module):
    """Cannot be vmapped, since it changes a tensor in place, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = torch.zeros(x.shape)
        out[:, 0] = x[:, 0] @ self.weight
        return self.drop(out)


class LastState(nn.Module):
    """The batch is not the first dimension of what the inner module returns."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        return self.inner(x)[1][0][0]


@pytest.mark.filterwarnings("ignore:No gradient rule", "ignore:.*cannot be vmapped")
@pytest.mark.parametrize(
    ("build", "shape", "size", "message"),
    [
        (Drops, (3, 6), 5, "do not add up"),
        (LastState, (3, 6), 5, "'inner'"),
        (lambda: nn.Sequential(nn.LSTM(6, 6)), (5, 6), 5, "'0'"),
        (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(), (3, 4, 4), 5, "track_running"),
    ],
)
def test_what_cannot_be_told_by_example_is_refused_by_name(build, shape, size, message):
    torch.manual_seed(0)
    model = build()
    loss = (lambda output, target: squares(output[0], target)) if isinstance(model, nn.Sequential) else squares
    with pytest.raises(ModelError, match=message):
        clipped_gradient_sum(model, loss, torch.randn(size, *shape), torch.zeros(size), clip_plan=ClipPlan.flat())


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_tensor_for_all_examples_is_passed_whole(size):
    torch.manual_seed(0)
    check(WithScale(), torch.randn(size, 8), PLANS[0])


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("size", [5, 8])
def test_a_table_that_is_not_finite_leaves_no_example_finite(size):
    torch.manual_seed(0)
    model = WithTable(Looks(), 8)
    model.table[1:] = torch.nan
    loss = lambda output, target: squares(output.nan_to_num(), target)  # noqa: E731
    sums, norms = clipped_gradient_sum(model, loss, torch.randn(size, 8), torch.zeros(size), clip_plan=PLANS[0])
    assert norms.isnan().all()
    assert not any(gradient.any() for gradient in sums.values())


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("size", [5, 6, 7])
def test_a_table_that_cannot_be_cut_is_not(size):
    torch.manual_seed(0)
    check(WithTable(Looks(standardize=True), 6), torch.randn(size, 8), PLANS[0])


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("row", [None, 5])
@pytest.mark.parametrize("size", [5, 6])
def test_gradients_that_add_up_are_not_enough_for_a_cut(size, row):
    torch.manual_seed(0)
    model, x, y = WithTable(Adds(row), 6), torch.randn(size, 8), torch.zeros(size)
    loss = lambda output, target: output.sum(1).mean()  # noqa: E731
    sums, _ = clipped_gradient_sum(model, loss, x, y, clip_plan=PLANS[0])
    assert relative_error(sums, clipped_sum_by_loop(model, x, y, PLANS[0], loss)[0]) < 1e-5


@pytest.mark.filterwarnings("ignore:No gradient rule", "ignore:There is a performance drop")
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("size", [3, 4])
def test_a_mask_with_as_many_rows_as_the_batch_is_not_cut(size, project):
    torch.manual_seed(0)
    check(Masked(4, project), torch.randn(size, 4, 6), PLANS[0])


@pytest.mark.filterwarnings("ignore:No gradient rule", "ignore:There is a performance drop")
@pytest.mark.parametrize("size", [3, 4])
def test_a_rotary_table_with_as_many_rows_as_the_batch_is_not_cut(size):
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_rope_224", img_size=32, depth=1, embed_dim=48, num_classes=6)
    check(model, torch.randn(size, 3, 32, 32), PLANS[0])  # four patches


@pytest.mark.filterwarnings("ignore:No gradient rule")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("size", "finite"), [(1, 0), (5, 4), (8, 0), (8, 1), (8, 7)])
def test_examples_that_are_not_finite_are_no_reason_to_refuse_the_batch_and_change_nothing_of_the_others(
    size, finite, zeros
):
    torch.manual_seed(0)
    model, x, y = WithScale(), torch.randn(size, 8), torch.zeros(size)
    model.scale += 1
    if zeros:
        nn.init.zeros_(model.inner.weight)
    x[finite:] = torch.nan
    loss = lambda output, target: (output * torch.arange(8)).sum(1).mean()  # noqa: E731
    sums, norms = clipped_gradient_sum(model, loss, x, y, clip_plan=PLANS[0])
    assert norms.isnan().tolist() == [False] * finite + [True] * (size - finite)
    if finite:
        others, _ = clipped_sum_by_loop(model, x[:finite], y[:finite], PLANS[0], loss)
        assert relative_error(sums, others) < 1e-5
    else:
        assert not sums["inner.weight"].any()


def test_a_parameter_that_is_used_without_its_module_is_named():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(F.linear(x, self.inner.weight))

    with pytest.warns(UserWarning, match=r"inner\.weight, inner\.bias did not run"):
        clipped_gradient_sum(Outside(), squares, torch.randn(4, 6), torch.zeros(4), clip_plan=ClipPlan.flat())


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(torch.zeros(4, 6), torch.zeros(1)), (torch.tensor(1.0), torch.zeros(1)), ([], None)],
)
def test_tensors_of_different_numbers_of_examples_are_refused(inputs, targets):
    with pytest.raises(ConfigurationError, match="first dimension of each must be the batch"):
        clipped_gradient_sum(nn.Linear(6, 2), squares, inputs, targets, clip_plan=ClipPlan.flat())


def test_a_gradient_that_is_zero_but_for_rounding_is_no_mixing():
    """A bias of the keys moves all scores of a query alike, so that its gradient is the rounding of others."""
    torch.manual_seed(0)
    model = timm.create_model("cait_xxs24_224", img_size=64, depth=1, embed_dim=48, num_heads=4, num_classes=5)
    x, y = torch.randn(3, 3, 64, 64), torch.arange(3)
    found, _ = clipped_gradient_sum(model, F.cross_entropy, x, y, clip_plan=ClipPlan.flat(max_grad_norm=1e6))
    expected = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    for name, gradient in zip(dict(model.named_parameters()), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)
