"""Every rule gives what a float64 loop over single examples gives: gradients, norms, and the clipped sum."""

import itertools
from unittest.mock import patch

import pytest
import torch
from reference import gradients_by_loop
from torch import nn
from torch.nn import functional as F

from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.gradients import convolution, linear, normalization, products
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.rules import RULES, Rule, per_example, register_rule
from dp_lightning.privacy.gradients.sources import Sources

B = 4


def scaled(input, scale, shift=None, *, power=1):
    """A function of one's own: each row of two dimensions times a scale per column, which has a power."""
    output = input * scale**power
    return output if shift is None else output + shift


def _scaled_gradients(call, gradient):
    inputs, power = call.inputs, call.arguments.get("power", 1)
    found = {"shift": gradient.flatten(1, -2).sum(1)}
    if "scale" in call.names:
        slope = power * call.arguments["scale"] ** (power - 1)
        found["scale"] = (inputs * gradient * slope).flatten(1, -2).sum(1)
    return {own: rows.unflatten(0, (-1, call.rows)).sum(1) for own, rows in found.items()}


OWN = register_rule(
    scaled,
    Rule(
        ("input", "scale", "shift"),
        ("scale", "shift"),
        lambda x, arguments: 2,
        per_example(_scaled_gradients),
        options=("power",),
    ),
)


class Case:
    """A function, the shape of one row of its input, its parameters and options; the rule may refuse such a call."""

    def __init__(self, function, row, parameters, options=None, *, leads=((), (3,), (2, 3)), high=None, refused=False):
        self.function, self.row, self.parameters, self.options = function, row, parameters, options or {}
        self.leads, self.high, self.refused = leads, high, refused

    def inputs(self, lead, dtype=torch.float64):
        shape = (B, *lead, *self.row)
        return torch.randn(shape, dtype=dtype) if self.high is None else torch.randint(self.high, shape)


ONE_ROW_DIMENSION = ((1,), (3,))  # the function takes rows (N, ...) and nothing else
CONVOLUTION = ((), (3,))


def conv(function, channels, weight, image, *, refused=False, **options):
    outputs = weight[1] * options.get("groups", 1) if "transpose" in function.__name__ else weight[0]
    parameters = {"weight": weight, "bias": (outputs,)}
    return Case(function, (channels, *image), parameters, options, leads=CONVOLUTION, refused=refused)


def norm(function, row, shape, leads=ONE_ROW_DIMENSION, **options):
    return Case(function, row, {"weight": shape, "bias": shape}, options, leads=leads)


CASES = {
    "linear": Case(F.linear, (4,), {"weight": (5, 4), "bias": (5,)}),
    "linear without bias": Case(F.linear, (4,), {"weight": (5, 4)}),
    "conv1d": conv(torch.conv1d, 4, (6, 2, 3), (9,), stride=2, padding=1, groups=2),
    "conv1d of one position": conv(torch.conv1d, 4, (6, 2, 3), (3,), groups=2),
    "conv1d same": conv(torch.conv1d, 3, (4, 3, 4), (9,), padding="same"),
    "conv2d": conv(torch.conv2d, 4, (6, 4, 3, 3), (5, 6), padding=(1, 2), dilation=2),
    "conv2d strided": conv(torch.conv2d, 4, (6, 4, 2, 3), (5, 6), stride=(2, 1)),
    "conv2d depthwise": conv(torch.conv2d, 4, (8, 1, 3, 3), (5, 5), groups=4),
    "conv2d 1x1": conv(torch.conv2d, 4, (6, 4, 1, 1), (3, 3)),
    "conv3d": conv(torch.conv3d, 2, (3, 2, 2, 2, 2), (4, 3, 4), padding=1),
    "transposed1d": conv(torch.conv_transpose1d, 4, (4, 3, 3), (5,), stride=2, output_padding=1, groups=2),
    "transposed1d, more output than stride": conv(
        torch.conv_transpose1d, 4, (4, 3, 4), (70,), dilation=3, output_padding=2, padding=1, refused=True
    ),
    "transposed2d": conv(torch.conv_transpose2d, 4, (4, 3, 3, 2), (4, 3), stride=(2, 3), padding=1),
    "transposed3d": conv(torch.conv_transpose3d, 2, (2, 3, 2, 2, 2), (2, 3, 2), stride=2),
    "embedding": Case(F.embedding, (), {"weight": (7, 3)}, high=7),
    "embedding with padding": Case(F.embedding, (5,), {"weight": (4, 3)}, {"padding_idx": -3}, high=4),
    "embedding with all options": Case(
        F.embedding,
        (5,),
        {"weight": (4, 3)},
        {"padding_idx": 2, "max_norm": None, "norm_type": 1.0, "scale_grad_by_freq": False, "sparse": True},
        high=4,
    ),
    "group norm": norm(F.group_norm, (6, 4, 3), (6,), num_groups=3),
    "group norm without positions": norm(F.group_norm, (6,), (6,), num_groups=2, eps=1e-2),
    "layer norm": norm(F.layer_norm, (4,), (4,), ((), (2, 3)), normalized_shape=(4,)),
    "layer norm of two dimensions": norm(F.layer_norm, (3, 4), (3, 4), ((), (3,)), normalized_shape=(3, 4), eps=1e-2),
    "own": Case(OWN, (2, 4), {"scale": (4,), "shift": (4,)}),
    "own with an option": Case(OWN, (2, 4), {"scale": (4,)}, {"power": 3}),
}


class Layer(nn.Module):
    """Calls a function with its own parameters, of which some are trained."""

    def __init__(self, case, trained):
        super().__init__()
        self.case = case
        for name, shape in case.parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64), name in trained))
        # A module before, so that the input of the function needs a gradient, and one of another layer.
        self.before = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        x = x * self.before if x.is_floating_point() else x
        parameters = {name: getattr(self, name) for name in self.case.parameters}
        out = self.case.function(x, **parameters, **self.case.options).float()
        return (out.tanh() * torch.arange(out.numel(), device=out.device).add(1).sin().view(out.shape)).sum()


def in_channels_last(x, lead):
    """The same numbers, of rows (*lead, channels, ...), with the channels last in memory."""
    rows = x.flatten(0, len(lead))
    return rows.movedim(1, -1).contiguous().movedim(-1, 1).unflatten(0, (len(x), *lead))


def trained_sets(case):
    names = list(case.parameters)
    return [names] if len(names) == 1 else [names, *([name] for name in names)]


def by_loop(layer, x):
    """Per-example gradients (b, *shape) by name, of the parameters that are used; one example after the other."""
    found = gradients_by_loop(layer, nn.Module.__call__, x)
    return {name: gradients for name, gradients in found.items() if gradients is not None}


def recorded(layer, x, take):
    recording = Recording({n: p for n, p in layer.named_parameters() if p.requires_grad}, len(x), take)
    recording.backward(recording.run(layer, x))
    return recording


def formed(layer, x):
    """The same as a step records them, and the parameters of which each example gets a copy."""
    found, copied, copies = {}, set(), Sources.copies

    def watched(sources, tensor, at):
        copied.add(next(name for name, parameter in layer.named_parameters() if parameter is tensor))
        return copies(sources, tensor, at)

    with patch.object(Sources, "copies", watched):
        recorded(layer, x, lambda contribution: found.update(contribution.formed().gradients))
    return found, copied


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # the loss is float32


PLANS = {"flat": ClipPlan.flat(max_grad_norm=0.5), "per layer": ClipPlan.per_layer(max_grad_norm=0.5)}


def test_there_is_a_case_for_every_rule():
    assert {case.function for case in CASES.values()} == set(RULES)


def test_there_is_a_case_for_every_option_that_a_rule_covers():
    for rule in {id(rule): rule for rule in RULES.values()}.values():
        cases = [case for case in CASES.values() if RULES[case.function] is rule]
        assert set(rule.options) == {option for case in cases for option in case.options}, rule.arguments


@pytest.fixture
def rules():
    """The rules, put back after the test."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def cosines(x, prototypes, dim=-1):
    return F.cosine_similarity(x, prototypes, dim=dim)


def never(call, gradient):
    raise AssertionError("the rule is used")


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("function", "trained", "row", "parameters", "options"),
    [
        # Called for all rows at once, an option may mean another dimension, and mix examples.
        *((cosines, ("prototypes",), (1, 4), {"prototypes": (5, 4)}, {"dim": dim}) for dim in (-1, 0, 1)),
        (scaled, ("scale",), (2, 4), {"scale": (4,), "shift": (4,)}, {}),
    ],
)
def test_a_call_with_an_option_or_a_parameter_that_the_rule_does_not_cover_gets_copies(
    function, trained, row, parameters, options
):
    rule = Rule(("input", *parameters, *options), trained, lambda x, arguments: 2, per_example(never))
    layer = Layer(Case(register_rule(function, rule), row, parameters, options), list(parameters))
    x = layer.case.inputs(())
    found, copied = formed(layer, x)
    assert copied >= set(parameters)
    assert_close(found, by_loop(layer, x))


@pytest.mark.parametrize("name", CASES)
def test_gradients_norms_and_clipped_sums_equal_the_loop(name):
    case = CASES[name]
    for lead, trained in itertools.product(case.leads, trained_sets(case)):
        layer, x = Layer(case, trained), case.inputs(lead)
        expected = by_loop(layer, x)
        found, copied = formed(layer, x)
        assert_close(found, expected)
        assert copied & set(trained) == (set(trained) if case.refused else set())
        for plan in PLANS.values():
            check_clipped(layer, x, expected, plan)


def check_clipped(layer, x, expected, plan):
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    total = ClippedSum(parameters, plan)
    total.begin(len(x))
    recorded(layer, x, total.take)
    norms = total.end()
    groups = plan.groups(parameters)
    for column, (names, bound) in enumerate(zip(groups.values(), plan.bounds(groups), strict=True)):
        used = [name for name in names if name in expected]
        squared = sum(expected[name].flatten(1).square().sum(1) for name in used)
        norm = torch.as_tensor(squared, dtype=torch.float64).sqrt().expand(len(x))
        torch.testing.assert_close(norms[:, column].double(), norm, rtol=1e-5, atol=1e-6)
        factors = (bound / norm).clamp_max(1.0)
        for own in used:
            clipped = torch.einsum("b,b...->...", factors, expected[own])
            assert total.sums[own].dtype == torch.float32
            torch.testing.assert_close(total.sums[own].double(), clipped, rtol=1e-5, atol=1e-5 * bound)


@pytest.mark.parametrize(("by_products", "by_place"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("way", ["formed", "Gram"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("linear", "conv", "transposed"))])
def test_every_way_of_a_product_gives_the_clipped_sum(monkeypatch, name, way, by_products, by_place):
    """In float32, in both memory formats, and where the examples come in several ranges.

    ``by_products``: weighted sums as on processors where a product is as fast as the ordinary weight gradient, or not.
    ``by_place``: patches of few positions, whose channels at a place stand together, and linear layers taken together.
    """
    monkeypatch.setattr(products, "kept_method", lambda size: way)
    monkeypatch.setattr(products, "streamed_method", lambda size, *, by_products: way)
    monkeypatch.setattr(products, "examples_at_a_time", lambda numbers, device: B - 1)
    # The bound of rounding, which has tests of its own, is added to the norm, however much the terms cancel.
    monkeypatch.setattr(products, "rounding_per_term", lambda positions: 0.0)
    monkeypatch.setattr(convolution, "below_avx512", lambda device: by_products)
    monkeypatch.setattr(convolution, "formed_by_products", lambda size, channels, dtype, device: by_products)
    monkeypatch.setattr(convolution, "patches_by_place", lambda size, channels, device: by_place)
    monkeypatch.setattr(linear, "_SMALL_LAYER", 2**16 if by_place else 0)
    case = CASES[name]
    for lead in case.leads:
        layer, x = Layer(case, list(case.parameters)), case.inputs(lead)
        expected = by_loop(layer, x)
        for rows, plan in itertools.product([x, *([in_channels_last(x, lead)] if lead else [])], PLANS.values()):
            check_clipped(layer.float(), rows.float(), expected, plan)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_close_to_the_loop_in_float64(name):
    case = CASES[name]
    lead = case.leads[-1]
    layer, x = Layer(case, list(case.parameters)), case.inputs(lead)
    expected = by_loop(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = formed(layer.float(), x.float() if x.is_floating_point() else x)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    error = torch.cat([(found[own].double() - g).flatten() for own, g in expected.items()]).norm() / norm
    # bfloat16 keeps 8 bits, of inputs, weights and gradients of the output.
    assert error < 2e-2


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.row) in (3, 4)])
def test_channels_last_equals_the_loop(name):
    case = CASES[name]
    for lead in ((1,), (3,)):
        layer, x = Layer(case, list(case.parameters)), case.inputs(lead)
        assert_close(formed(layer, in_channels_last(x, lead))[0], by_loop(layer, x))


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)], ids=" and ".join)
@pytest.mark.parametrize("lead", [(1,), (3,)], ids=str)
def test_groups_are_folded_where_that_takes_no_copy_and_few_blocks(lead, trained, monkeypatch):
    layer, x = Layer(CASES["group norm"], trained), CASES["group norm"].inputs(lead)
    expected = by_loop(layer, x)

    def is_folded(x):
        with patch.object(Sources, "leaf", autospec=True, side_effect=Sources.leaf) as leaf:
            assert_close(formed(layer, x)[0], expected)
        own = [dict(layer.named_parameters())[name] for name in trained]
        return any(call.args[1] is parameter for call in leaf.call_args_list for parameter in own)

    assert is_folded(x)
    assert not is_folded(in_channels_last(x, lead))
    monkeypatch.setattr(normalization, "_MOST_GROUPS", B * lead[0] * layer.case.options["num_groups"] - 1)
    assert not is_folded(x)


class _UsedTwice(nn.Module):
    """One normalization on contiguous rows, where it is folded, and on others, where its rule is used."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(3, 6).double()

    def forward(self, x):
        last = x.movedim(-3, -1).contiguous().movedim(-1, -3)
        return (self.norm(x) + 2 * self.norm(last).sin()).square().sum()


def test_a_weight_that_is_folded_and_used_by_its_rule_adds_up():
    model, x = _UsedTwice(), torch.randn(B, 1, 6, 4, 3, dtype=torch.float64)
    expected = by_loop(model, x)
    assert_close(formed(model, x)[0], expected)
    check_clipped(model, x, expected, PLANS["flat"])


@pytest.mark.parametrize("name", ["linear", "conv2d", "group norm", "own"])
def test_an_input_that_needs_no_gradient_is_recorded(name):
    case = CASES[name]
    layer, x = Layer(case, list(case.parameters)), case.inputs(case.leads[-1])
    layer.before.requires_grad_(False)
    assert_close(formed(layer, x)[0], by_loop(layer, x))


def test_a_function_of_ones_own_is_called_as_before_outside_of_a_step():
    x, scale = torch.randn(3, 2, 4), torch.randn(4)
    assert torch.equal(OWN(x, scale, power=2), scaled(x, scale, power=2))


@pytest.mark.usefixtures("rules")
def test_a_rule_for_a_function_of_torch_belongs_to_that_function():
    rule = Rule(("input", "weight"), ("weight",), lambda x, arguments: x.dim() - 1, per_example(never))
    assert register_rule(F.prelu, rule) is F.prelu
    layer = Layer(Case(F.prelu, (3, 5), {"weight": (3,)}), ["weight"])
    with pytest.raises(AssertionError, match="the rule is used"):
        formed(layer, layer.case.inputs((2,)))
