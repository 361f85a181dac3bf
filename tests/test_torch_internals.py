"""Each private member of torch does what it is used for, with the torch that is installed here."""

from pathlib import Path

import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from dp_lightning import torch_internals as internals

LINES = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
PINNED = dict(line.split("==") for line in LINES if "==" in line and not line.startswith("#"))


class Seen(torch.overrides.TorchFunctionMode):
    """What a function mode sees."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_the_versions_that_were_tried_are_the_pinned_ones():
    assert {name: PINNED[name] for name in internals.TRIED} == internals.TRIED


def test_both_names_of_a_grouped_product_are_seen_alike():
    assert callable(internals.grouped_mm)
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    offs = torch.tensor([2, 4], dtype=torch.int32)
    with Seen() as seen:
        F.grouped_mm(a, b, offs=offs)
    assert {F.grouped_mm, internals.grouped_mm} & set(seen.functions)


def test_hooks_of_a_parameter():
    def parameter():
        return nn.Parameter(torch.ones(1))

    first, second, third = parameter(), parameter(), parameter()
    first.register_hook(lambda gradient: None)
    second.register_post_accumulate_grad_hook(lambda owner: None)
    assert [internals.has_hooks(each) for each in (first, second, third)] == [True, True, False]


def test_inside_of_a_vmap():
    found, weight = {}, torch.ones(3)

    def one(x):
        found.update(
            batched=(internals.is_batched(x), internals.is_batched(weight)),
            wrapped=(internals.is_wrapped(x), internals.is_wrapped(weight)),
            level=internals.level(),
            dim=internals.batch_dimension(x),
            tensor=internals.wrapped_tensor(x),
        )
        with internals.below_transforms():
            found["below"] = internals.level()
            whole = internals.wrapped_tensor(x) * 2
        return internals.add_batch_dimension(whole.movedim(1, 0), 0, internals.level())

    examples = torch.arange(6.0).view(3, 2)
    result = vmap(one, in_dims=1)(examples)
    assert found.pop("tensor") is examples
    assert found == {"batched": (True, False), "wrapped": (True, False), "level": 1, "dim": 1, "below": None}
    assert torch.equal(result, 2 * examples.T)
    assert internals.level() is None


def test_a_wrapper_of_an_inner_transform_leads_to_the_tensor_of_the_example():
    def one(x):
        return grad(lambda inner: kept.append(inner) or inner.sum())(x) + x.sum()

    kept = []
    vmap(lambda x: kept.append(x) or one(x))(torch.ones(3, 2))
    example, inner = kept
    assert internals.is_wrapped(inner)
    assert not internals.is_batched(inner)
    assert internals.wrapped_tensor(inner) is example
    assert internals.is_batched(example)  # after the transform has ended, too
