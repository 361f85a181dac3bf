"""Each private member of torch, numpy and Python does what it is used for, with the torch that is installed here."""

import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import library, nn
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


@pytest.mark.parametrize("operation", ["conv", "rnn", "matmul"])
def test_the_precision_of_products_is_what_was_set_for_them(operation):
    backend = getattr(torch.backends.mkldnn, operation)
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        assert internals.precision_of("mkldnn", operation) == "bf16"
    finally:
        backend.fp32_precision = before
    assert internals.precision_of("generic", "all") == torch.backends.fp32_precision


def test_the_versions_that_were_tried_are_the_pinned_ones():
    assert {name: PINNED[name] for name in internals.TRIED} == internals.TRIED


def test_what_is_installed_is_of_the_versions_that_are_supported():
    assert tuple(map(int, version("torch").split("+")[0].split(".")[:2])) >= (2, 11)


@pytest.mark.parametrize(
    ("getter", "read"),
    [
        (internals.GRAD_FN, lambda x: x.grad_fn),
        (internals.REQUIRES_GRAD, lambda x: x.requires_grad),
        (internals.VERSION, lambda x: x._version),
    ],
    ids=["grad_fn", "requires_grad", "version"],
)
def test_a_mode_sees_the_getter_of_an_attribute(getter, read):
    x = torch.ones(2, requires_grad=True) * 2
    with Seen() as seen:
        value = read(x)
    assert seen.functions == [getter]
    assert getter(x) == value


def test_the_version_of_a_tensor_counts_writes():
    x = torch.ones(2)
    before = internals.version_of(x)
    x.add_(1)
    assert internals.version_of(x) == before + 1


def test_a_gradient_is_read_past_a_subclass():
    class Hides(torch.Tensor):
        grad = None

    leaf = torch.ones(2).as_subclass(Hides).requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad is None
    assert internals.gradient_of(leaf).tolist() == [2.0, 2.0]


def test_tensors_change_places():
    a, b = torch.zeros(1), torch.ones(2)
    also_a = a
    internals.swap(a, b)
    assert also_a.tolist() == [1.0, 1.0]
    assert b.tolist() == [0.0]


def test_torch_functions_are_hidden():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    loud = torch.ones(2).as_subclass(Loud)
    with internals.without_torch_function_of_subclasses():
        assert (loud + 1).sum() == 4
    with Seen() as seen, internals.without_torch_function():
        torch.ones(2).sum()
    assert seen.functions == []


def test_functions_of_lists():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    assert [norm.item() for norm in internals.norms(tensors)] == [5.0, 5.0]
    internals.add_all_(tensors, [torch.ones(2), torch.tensor([2.0])])
    assert [tensor.tolist() for tensor in tensors] == [[4.0, 5.0], [7.0]]
    internals.lerp_all_(tensors, [torch.tensor([0.0, 1.0]), torch.tensor([1.0])], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 3.0], [4.0]]


def test_both_names_of_a_grouped_product_are_seen_alike():
    assert callable(internals.grouped_mm)
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    offs = torch.tensor([2, 4], dtype=torch.int32)
    with Seen() as seen:
        F.grouped_mm(a, b, offs=offs)
    assert {F.grouped_mm, internals.grouped_mm} & set(seen.functions)


def test_storages():
    x = torch.ones(4)
    view, copy = x[1:], x.clone()
    assert internals.storage_address(view) == internals.storage_address(x) != internals.storage_address(copy)
    assert internals.storage_uses(copy) == 2  # the tensor, and this look at it
    assert internals.storage_uses(x) == 3
    assert internals.is_view(view)
    assert not internals.is_view(x)


def test_hooks_of_a_parameter():
    def parameter():
        return nn.Parameter(torch.ones(1))

    first, second, third = parameter(), parameter(), parameter()
    first.register_hook(lambda gradient: None)
    second.register_post_accumulate_grad_hook(lambda owner: None)
    assert [internals.has_hooks(each) for each in (first, second, third)] == [True, True, False]


def test_the_processor_says_whether_it_has_bfloat16():
    assert isinstance(internals.has_bfloat16_on_cpu(), bool)


def test_inside_of_a_vmap():
    found, weight = {}, torch.ones(3)

    def one(x):
        found.update(
            batched=(internals.is_batched(x), internals.is_batched(weight)),
            wrapped=(internals.is_wrapped(x), internals.is_wrapped(weight)),
            level=(internals.level(), internals.level_of(x), internals.level_of(weight)),
            name=internals.innermost_transform(),
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
    assert found == {
        "batched": (True, False),
        "wrapped": (True, False),
        "level": (1, 1, -1),
        "name": "vmap",
        "dim": 1,
        "below": None,
    }
    assert torch.equal(result, 2 * examples.T)
    assert internals.level() is None
    grad(lambda x: found.update(name=internals.innermost_transform()) or x.sum())(torch.ones(2))
    assert found["name"] == "grad"


def test_what_a_vmap_returns_is_seen():
    seen = []
    with internals.vmap_results_seen(seen.append):
        result = vmap(lambda x: x + 1)(torch.zeros(2))
    assert [torch.equal(each, result) for each in seen] == [True]
    vmap(lambda x: x)(torch.zeros(2))
    assert len(seen) == 1


def test_an_operator_says_whether_it_has_a_vmap_of_its_own():
    assert isinstance(torch.ops.aten.sin.default, internals.OpOverload)
    assert isinstance(torch.ops.aten.sin, internals.OpOverloadPacket)
    assert internals.has_vmap_kernel(torch.ops.aten.sin.default)

    @library.custom_op("example::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    operator = torch.ops.example.twice.default
    assert not internals.has_vmap_kernel(operator)
    twice.register_vmap(lambda info, dims, x: (x * 2, dims[0]))
    assert internals.has_vmap_kernel(operator)


def test_numbers_are_hidden_from_code_that_asks():
    assert not torch.compiler.is_compiling()
    with internals.numbers_hidden():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_the_text_of_an_example_is_replaced():
    texts = []
    with internals.text_of_wrapped("hidden"):
        vmap(lambda x: texts.append(repr(x)) or x)(torch.tensor([1.25]))
    vmap(lambda x: texts.append(repr(x)) or x)(torch.tensor([1.25]))
    hidden, shown = texts
    assert "hidden" in hidden
    assert "1.25" not in hidden
    assert "1.25" in shown


def test_higher_order_operators_are_known_by_their_class():
    from torch._higher_order_ops.cond import cond_op

    assert isinstance(cond_op, internals.HigherOrderOperator)


def test_trees():
    tree = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    leaves, structure = internals.tree_flatten(tree)
    assert isinstance(structure, internals.TreeSpec)
    assert internals.tree_leaves(tree) == leaves
    assert internals.tree_unflatten(leaves, structure) == tree
    assert internals.tree_map_only(torch.Tensor, torch.Tensor.item, tree) == {"a": [1.0, 2], "b": (0.0,)}


def test_members_of_a_module():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert isinstance(module[0], internals.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), internals.BatchNorm)
    parameters, buffers, modules = (getattr(module[0], name) for name in internals.MODULE_MEMBERS)
    assert set(parameters) == {"weight", "bias"}
    assert set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert modules == {}
    assert internals.MODULE_MEMBERS[0] == internals.PARAMETERS


def test_a_compiled_module_is_known():
    plain, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile()
    assert [internals.is_compiled(m) for m in (plain, in_place, torch.compile(plain))] == [False, True, True]


def test_a_schedule_marks_the_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert internals.CALLED not in vars(optimizer)
    optimizer.step()
    assert internals.CALLED in vars(optimizer)


def test_what_torch_has_in_c():
    assert internals.core.TensorBase is torch.Tensor.__base__


def test_numpys_generator_is_that_of_its_functions():
    before = np.random.get_state()
    try:
        internals.global_numpy_generator.seed(5)
        expected = internals.global_numpy_generator.rand()
        np.random.seed(5)
        assert np.random.rand() == expected
    finally:
        np.random.set_state(before)


def test_a_cached_function_and_a_thread_of_others_are_known():
    import _thread
    import functools

    assert isinstance(functools.lru_cache(len), internals.CachedFunction)
    kinds, done = [], threading.Event()
    _thread.start_new_thread(lambda: (kinds.append(type(threading.current_thread())), done.set()), ())
    assert done.wait(10)
    assert kinds == [internals.ForeignThread]
    assert type(threading.current_thread()) is not internals.ForeignThread
