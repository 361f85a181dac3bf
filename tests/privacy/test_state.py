"""What a model can remember is seen, and named, wherever Python can keep it."""

import array
import collections
import contextvars
import copy
import functools
import gc
import hashlib
import importlib
import io
import itertools
import os
import queue
import random
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from dp_lightning.privacy.isolation import contents
from dp_lightning.privacy.isolation.reachable import reachable
from dp_lightning.privacy.isolation.state import ABSENT, StateSnapshot

BANK = []
CALLS = 0


class Holder(nn.Module):
    """Keeps one value, whatever it is."""

    def __init__(self, value=None):
        super().__init__()
        self.value = value


class WithClassState(nn.Module):
    bank = []  # noqa: RUF012
    count = 0


class UsesGlobals(nn.Module):
    def training_step(self, batch):
        def inner():
            global CALLS
            CALLS += 1
            BANK.append(batch)

        inner()


class Slotted:
    __slots__ = ("_Slotted__hidden", "seen")

    def __init__(self):
        self.seen = 0


@dataclass
class Record:
    items: list = field(default_factory=list)


class BadManners:
    """Raises wherever a comparison could ask it something."""

    def __eq__(self, other):
        raise RuntimeError("no")

    def __getattr__(self, name):
        return 1

    def __repr__(self):
        raise RuntimeError("no")

    def __len__(self):
        raise RuntimeError("no")

    def __bool__(self):
        raise RuntimeError("no")

    __hash__ = object.__hash__


class Everything:
    """Equals whatever it is compared with."""

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


def paths(snapshot):
    return [change.path for change in snapshot.changes()]


def counter():
    seen = 0

    def count():
        nonlocal seen
        seen += 1

    return count


def function_with(memory):
    def remember(x, bank=memory):
        bank.append(x)

    return remember


def advance(value):
    next(value)


def second_round():
    cycle = itertools.cycle([0, 1])
    next(cycle), next(cycle), next(cycle)
    return cycle


@functools.cache
def cached(key):
    return []


cached(1)


def naturals():
    number = 0
    while True:
        number += 1
        yield number


class WithMethod:
    def __init__(self):
        self.calls = 0

    def call(self):
        self.calls += 1


def write(value, key, new):
    value[key] = new


def attribute(name, new):
    return lambda value: setattr(value, name, new)


REMEMBERING = {
    "list": ([1, 2], lambda value: value.append(3), "model.value"),
    "list item": ([1, 2], lambda value: write(value, 1, 3), "model.value[1]"),
    "nested list": ([[], []], lambda value: value[1].append(3), "model.value[1]"),
    "long list": (list(range(5000)), lambda value: write(value, 7, -1), "model.value[7]"),
    "tuple of lists": (([], []), lambda value: value[0].append(1), "model.value[0]"),
    "dict": ({"a": 1}, lambda value: write(value, "a", 2), "model.value['a']"),
    "new key": ({"a": 1}, lambda value: write(value, "b", 2), "model.value['b']"),
    "lost key": ({"a": 1}, lambda value: value.pop("a"), "model.value['a']"),
    "tensor key": ({torch.zeros(2): 1}, lambda value: next(iter(value)).fill_(1), "model.value[Tensor]"),
    "ordered": (OrderedDict(a=1), lambda value: write(value, "a", 2), "model.value['a']"),
    "defaultdict": (defaultdict(list), lambda value: value["a"], "model.value['a']"),
    "set": ({1, 2}, lambda value: value.add(3), "model.value"),
    "empty set": (set(), lambda value: value.add(3), "model.value"),
    "deque": (deque([1, 2], maxlen=2), lambda value: value.append(3), "model.value"),
    "dataclass": (Record(), lambda value: value.items.append(1), "model.value.items"),
    "slots": (Slotted(), attribute("seen", 1), "model.value.seen"),
    "hidden slot": (Slotted(), attribute("_Slotted__hidden", 1), "model.value._Slotted__hidden"),
    "nested module": (nn.Sequential(Holder(0)), lambda value: setattr(value[0], "value", 1), "model.value[0].value"),
    "equal by ==": ([1, 2], lambda value: write(value, 0, Everything()), "model.value[0]"),
    "another type": ([1, 2], lambda value: write(value, 0, True), "model.value[0]"),
    "closure": (counter(), lambda value: value(), "model.value.seen"),
    "default": (function_with([]), lambda value: value(1), "model.value.__defaults__[0]"),
    "function attribute": (counter(), attribute("seen_by_all", 1), "model.value.seen_by_all"),
    "partial": (functools.partial(print, []), lambda value: value.args[0].append(1), "model.value.args[0]"),
    "bound method": (WithMethod().call, lambda value: value(), "model.value.__self__.calls"),
    "builtin method": ([].append, lambda value: value(1), "model.value"),
    "cache": (functools.cache(lambda x: x), lambda value: value(1), "model.value[1]"),
    "count": (itertools.count(), advance, "model.value"),
    "list iterator": (iter([1, 2]), advance, "model.value"),
    "reversed": (reversed([1, 2]), advance, "model.value"),
    "range iterator": (iter(range(9)), advance, "model.value"),
    "iterator of a dict": (iter({1: 2}.values()), advance, "model.value"),
    "iterator of a set": (iter({1}), advance, "model.value"),
    "iterator of a deque": (iter(deque([1])), advance, "model.value"),
    "map": (map(abs, range(9)), advance, "model.value"),
    "zip": (zip(range(9), strict=True), advance, "model.value[0]"),
    "enumerate": (enumerate("abc"), advance, "model.value"),
    "first round of a cycle": (itertools.cycle([0, 1]), advance, "model.value"),
    "second round of a cycle": (second_round(), advance, "model.value"),
    "chain": (itertools.chain([1], [2]), advance, "model.value"),
    "islice": (itertools.islice([1, 2], 2), advance, "model.value"),
    "bytes in memory": (io.BytesIO(b"ab"), lambda value: value.read(1), "model.value"),
    "text in memory": (io.StringIO("ab"), lambda value: value.write("c"), "model.value"),
    "array of the standard library": (array.array("d", [0.0]), lambda value: write(value, 0, 1.0), "model.value"),
    "bytearray": (bytearray(3), lambda value: write(value, 0, 1), "model.value"),
    "memoryview": (memoryview(bytearray(3)), lambda value: write(value, 0, 1), "model.value"),
    "hash": (hashlib.sha256(), lambda value: value.update(b"a"), "model.value"),
    "arguments of an error": (ValueError([]), lambda value: value.args[0].append(1), "model.value[0]"),
    "cached list": (cached, lambda value: value(1).append(1), "model.value[1]"),
    "queue": (queue.SimpleQueue(), lambda value: value.put(1), "model.value"),
    "thread-local": (threading.local(), attribute("seen", 1), "model.value.seen"),
    "context variable": (contextvars.ContextVar("seen"), lambda value: value.set(1), "model.value"),
    "gradient": (torch.zeros(2), attribute("grad", torch.ones(2)), "model.value.grad"),
    "generator": (naturals(), advance, "model.value"),
    "started generator": ((lambda it: (next(it), it)[1])(naturals()), advance, "model.value"),
    "object array": (np.array([1, None], dtype=object), lambda value: write(value, 0, 2), "model.value"),
}  # fmt: skip


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_is_remembered_is_named_by_its_path(name):
    value, remember, path = REMEMBERING[name]
    snapshot = StateSnapshot(Holder(value))
    assert snapshot.changes() == []
    remember(value)
    assert min(paths(snapshot), key=len) == path  # an iterator may hold another one, which moves with it
    snapshot.refresh()
    assert snapshot.changes() == []


GENERATORS = {
    "torch": (torch.Generator(), lambda value: torch.rand(1, generator=value)),
    "numpy": (np.random.default_rng(0), lambda value: value.random()),
    "legacy": (np.random.RandomState(0), lambda value: value.rand()),
    "bits": (np.random.MT19937(0), lambda value: value.random_raw()),
    "python": (random.Random(0), lambda value: value.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_from_a_generator_is_seen(name):
    generator, draw = GENERATORS[name]
    snapshot = StateSnapshot(Holder([generator]))
    assert snapshot.changes() == []
    draw(generator)
    assert [(change.path, change.kind) for change in snapshot.changes()] == [("model.value[0]", "generator")]
    snapshot.refresh()
    assert snapshot.changes() == []


def test_the_attributes_of_a_users_class_are_seen():
    snapshot = StateSnapshot(nn.Sequential(WithClassState()))
    WithClassState.bank.append(1)
    WithClassState.count += 1
    try:
        assert set(paths(snapshot)) == {"WithClassState.bank", "WithClassState.count"}
    finally:
        WithClassState.bank.clear()
        WithClassState.count = 0


def test_the_globals_that_a_function_names_are_seen():
    module = UsesGlobals()
    snapshot = StateSnapshot(module)
    module.training_step(1)
    assert {path.rpartition(".")[2] for path in paths(snapshot)} == {"BANK", "CALLS"}
    BANK.clear()


class UsesLibraries(nn.Module):
    def training_step(self, batch):
        os.environ["ATTACK"] = "1"
        torch.nn.functional.attack = 1
        torch.nn.functional.relu.attack = 1
        torch.nn.Linear.attack = 1
        sys.attack = 1


def test_what_is_set_on_libraries_that_a_function_names_is_seen(monkeypatch):
    monkeypatch.delenv("ATTACK", raising=False)
    snapshot = StateSnapshot(UsesLibraries())
    UsesLibraries().training_step(1)
    found = set(paths(snapshot))
    names = {"torch.nn.functional.attack", "torch.nn.functional.relu.attack", "Linear.attack", "sys.attack"}
    for owner in (torch.nn.functional, torch.nn.functional.relu, torch.nn.Linear, sys):
        del owner.attack
    del os.environ["ATTACK"]
    assert found == names | {"os.environ._data[b'ATTACK']"}
    assert snapshot.changes() == []


def test_a_global_that_no_function_names_is_seen_but_not_followed():
    module = UsesGlobals()
    snapshot = StateSnapshot(module)
    globals()["unnamed"] = [module]
    (change,) = snapshot.changes()
    assert (change.path.rpartition(".")[2], change.kind) == ("unnamed", "global")
    snapshot.refresh()
    unnamed.append(1)  # noqa: F821
    assert snapshot.changes() == []
    del globals()["unnamed"]


def test_a_note_of_python_or_its_compiler_is_no_change_and_hides_no_later_one():
    snapshot = StateSnapshot(nn.Sequential(UsesGlobals()))
    UsesGlobals.__slotnames__ = globals()["__compiled_fn_0"] = globals()["imported"] = collections
    assert snapshot.changes() == []
    snapshot.refresh()
    UsesGlobals.__slotnames__ = globals()["__compiled_fn_0"] = globals()["imported"] = 5
    found = snapshot.changes()
    del UsesGlobals.__slotnames__, globals()["__compiled_fn_0"], globals()["imported"]
    assert {change.path.rpartition(".")[2] for change in found} == {"__slotnames__", "__compiled_fn_0", "imported"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two packages among the installed ones; the second has a module's class, and uses the first."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_tool.py").write_text("INNER = []\ndef count():\n    INNER.append(1)\n")
    (folder / "some_models.py").write_text(
        "import some_tool\nfrom torch import nn\nCOUNTS = []\n\n\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        COUNTS.append(some_tool.count())\n"
        "\n\ndef loss(batch):\n    COUNTS.append(1)\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("some_models"), importlib.import_module("some_tool")
    del sys.modules["some_models"], sys.modules["some_tool"]


@pytest.mark.parametrize("make", [lambda models: nn.Sequential(models.Net()), lambda models: models.loss])
def test_globals_of_an_installed_package_are_seen_where_classes_or_the_loss_come_from_it(installed, make):
    models, tool = installed
    snapshot = StateSnapshot(make(models))
    models.COUNTS.append(1)
    assert [change.path for change in snapshot.changes()] == ["some_models.COUNTS"]
    snapshot.refresh()
    tool.INNER.append(1)
    assert snapshot.changes() == []


def test_state_is_put_back_in_containers_classes_and_closures():
    cell, items, named, unique, recent, slotted = [0], [1, 2], {"a": 1, "b": 2}, {1}, deque([1, 2]), Slotted()

    @functools.lru_cache
    def cached(value):
        return value

    def keeps():
        return cell

    holder = Holder([items, named, unique, recent, keeps, cached, WithClassState(), slotted])
    snapshot = StateSnapshot(holder)

    def change():
        nonlocal cell
        cell, holder.more, named["c"], WithClassState.count, WithClassState.more = [1], 3, 4, 5, 6
        del items[:], named["a"]
        unique.add(3)
        recent.append(3)
        cached(3)

    change()
    assert len(snapshot.changes()) > 7
    assert snapshot.restore() == []
    assert (cell, items, named, unique, list(recent)) == ([0], [1, 2], {"a": 1, "b": 2}, {1}, [1, 2])
    assert (cached.cache_info().currsize, WithClassState.count) == (0, 0)
    assert not hasattr(holder, "more")
    assert not hasattr(WithClassState, "more")
    change()
    slotted.seen = 9
    assert [change.path for change in snapshot.restore()] == ["model.value[7].seen"]


def test_a_variable_without_a_value_has_none_again():
    def keeps():
        return late

    snapshot = StateSnapshot(Holder(keeps))
    late = 1
    assert [change.path for change in snapshot.changes()] == ["model.value.late"]
    assert snapshot.restore() == []
    with pytest.raises(NameError):
        keeps()
    late = late_again = 2
    assert late == late_again


class Watched:
    pass


def test_what_a_weak_set_loses_with_its_object_is_no_change():
    kept = [Watched(), Watched()]
    holder = Holder([weakref.WeakSet(kept), weakref.WeakValueDictionary(enumerate(kept))])
    snapshot = StateSnapshot(holder)
    kept.pop()
    gc.collect()
    assert len(holder.value[0]) == 1
    assert snapshot.changes() == []
    holder.value[0].discard(kept[0])
    assert snapshot.changes()


SETTINGS = {
    "torch.get_default_dtype": (torch.set_default_dtype, torch.float32, torch.float64),
    "torch.get_num_threads": (torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads() + 1),
    "torch._C._get_deterministic_algorithms": (torch.use_deterministic_algorithms, False, True),
    "torch.is_grad_enabled": (torch._C._set_grad_enabled, True, False),
    "torch._C._get_mkldnn_enabled": (torch._C._set_mkldnn_enabled, True, False),
    "torch._C._get_math_sdp_enabled": (torch.backends.cuda.enable_math_sdp, True, False),
    "torch._C._get_blas_preferred_backend": (
        torch._C._set_blas_preferred_backend,
        torch._C._BlasBackend.Cublas,
        torch._C._BlasBackend.Cublaslt,
    ),
    "torch.set_flush_denormal": (torch.set_flush_denormal, False, True),
    "fp32_precision of mkldnn.matmul": (
        lambda kind: setattr(torch.backends.mkldnn.matmul, "fp32_precision", kind),
        "none",
        "bf16",
    ),
    "numpy.geterrcall": (np.seterrcall, None, print),
    "sys.getrecursionlimit": (sys.setrecursionlimit, sys.getrecursionlimit(), sys.getrecursionlimit() + 1),
    "numpy.geterr": (lambda kind: np.seterr(under=kind), "ignore", "raise"),
    "os.getcwd": (os.chdir, os.getcwd(), os.path.dirname(os.getcwd())),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_is_seen(name):
    put, before, after = SETTINGS[name]
    snapshot = StateSnapshot(nn.Linear(2, 2))
    assert snapshot.changes() == []
    put(after)
    try:
        found = snapshot.changes()
    finally:
        put(before)
    assert (name, "global") in [(change.path, change.kind) for change in found]
    assert snapshot.changes() == []


def test_a_precision_that_torch_tells_in_one_of_two_ways_is_a_setting_too():
    """After one operation has been given TF32, torch raises where it is asked for that of all."""
    snapshot, conv = StateSnapshot(nn.Linear(2, 2)), torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        with pytest.raises(RuntimeError, match="TF32"):
            _ = torch.backends.cudnn.allow_tf32
        found = {change.path for change in snapshot.changes()}
        again = StateSnapshot(nn.Linear(2, 2)).changes()
    finally:
        conv.fp32_precision = before
    assert {"fp32_precision of cuda.conv", "torch._C._get_cudnn_allow_tf32"} <= found
    assert again == []


def test_a_global_rebound_after_a_refresh_is_seen():
    module = UsesGlobals()
    snapshot = StateSnapshot(module)
    for _ in range(2):
        module.training_step(1)
        assert len(set(paths(snapshot))) == 2
        snapshot.refresh()
        assert paths(snapshot) == []
    BANK.clear()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((10**9, "text"), (10**9, "te" + "xt".strip())),
        (float("nan"), float("nan")),
        (torch.Size([3, 4]), torch.zeros(3, 4).shape),
        (np.float32(0.5), np.float32(0.5)),
    ],
)
def test_an_equal_immutable_or_another_order_of_a_dict_is_no_change(before, after):
    holder = Holder(before)
    snapshot = StateSnapshot(holder)
    if isinstance(before, dict):
        before.clear()
        before.update(after)
    else:
        holder.value = after
    assert snapshot.changes() == []


def test_minus_zero_is_a_change():
    holder = Holder(0.0)
    snapshot = StateSnapshot(holder)
    holder.value = -0.0
    assert paths(snapshot) == ["model.value"]


def test_a_mutable_replaced_by_an_equal_one_is_a_change():
    holder = Holder([1])
    snapshot = StateSnapshot(holder)
    holder.value = [1]
    assert paths(snapshot) == ["model.value"]


def test_cycles_and_odd_objects_end_nothing():
    odd = BadManners()
    holder = Holder([odd, {odd: odd}, {odd}, np.zeros(3), torch.zeros(3), lambda: odd])
    holder.value.append(holder.value)
    holder.itself = [holder]
    snapshot = StateSnapshot(holder)
    assert snapshot.changes() == []
    odd.kept = 1
    holder.value[0] = BadManners()
    holder.value[3] = np.ones(3)
    assert set(paths(snapshot)) == {"model.value[0].kept", "model.value[0]", "model.value[3]"}


def undo(change):
    if change.old is ABSENT:
        del change.holder[change.key]
    else:
        change.holder[change.key] = change.old


REBINDINGS = {
    "attribute": (lambda module: setattr(module, "count", 1), "model.count", 0),
    "new attribute": (lambda module: setattr(module, "last", 1), "model.last", ABSENT),
    "lost attribute": (lambda module: delattr(module, "count"), "model.count", 0),
    "buffer": (lambda module: setattr(module, "mean", torch.ones(3)), "model.mean", "mean"),
    "buffer that was None": (lambda module: setattr(module, "later", torch.ones(3)), "model.later", None),
    "new buffer": (lambda module: module.register_buffer("new", torch.ones(3)), "model.new", ABSENT),
    "parameter": (lambda module: setattr(module, "weight", nn.Parameter(torch.ones(3))), "model.weight", "weight"),
    "submodule": (lambda module: setattr(module, "inner", nn.Linear(2, 2)), "model.inner", "inner"),
    "hook": (lambda module: module._forward_hooks.update({7: print}), "model._forward_hooks[7]", ABSENT),
    "item": (lambda module: write(module.items, 1, torch.ones(3)), "model.items[1]", None),
    "dict item": (lambda module: write(module.table, "a", 2), "model.table['a']", 1),
}


@pytest.mark.parametrize("name", REBINDINGS)
@pytest.mark.parametrize("ignored", [lambda owner, name: False, lambda owner, name: name == "trainer"])
def test_what_took_the_place_of_another_value_can_be_put_back(name, ignored):
    module = Holder()
    module.count, module.items, module.table, module.trainer = 0, [1, None], {"a": 1}, object()
    module.weight, module.inner = nn.Parameter(torch.zeros(3)), nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(3))
    module.register_buffer("later", None)
    step, path, old = REBINDINGS[name]
    if isinstance(old, str):
        old = getattr(module, old)
    snapshot = StateSnapshot(module, ignored)
    for _ in range(2):
        step(module)
        (change,) = snapshot.changes()
        assert (change.path, change.old is old) == (path, True)
        assert change.new is change.holder.get(change.key, ABSENT) if isinstance(change.holder, dict) else True
        undo(change)
        assert snapshot.changes() == []
        snapshot.refresh()
        assert snapshot.changes() == []
    step(module)
    snapshot.refresh()
    assert snapshot.changes() == []


def test_what_cannot_be_put_back_under_a_key_has_no_holder():
    slotted, closure, items = Slotted(), counter(), [1]
    snapshot = StateSnapshot(Holder([slotted, closure, items]))
    slotted.seen = 1
    closure()
    items.append(2)
    found = snapshot.changes()
    assert [change.path for change in found] == ["model.value[0].seen", "model.value[1].seen", "model.value[2]"]
    assert all((change.holder, change.key, change.old, change.new) == (None,) * 4 for change in found)


def test_a_global_can_be_put_back():
    module = UsesGlobals()
    snapshot = StateSnapshot(module)
    module.training_step(1)
    changes = {change.path.rpartition(".")[2]: change for change in snapshot.changes()}
    undo(changes["CALLS"])
    BANK.clear()
    assert snapshot.changes() == []


def test_a_copy_of_an_object_is_no_change_of_its_class():
    record = Record()
    snapshot = StateSnapshot(Holder(record))
    copy.deepcopy(record)
    assert snapshot.changes() == []


def test_ignored_attributes_are_neither_compared_nor_followed():
    holder = Holder([])
    holder.trainer = Holder([])

    def ignored(owner, name):
        return name == "trainer"

    snapshot = StateSnapshot(holder, ignored)
    holder.trainer.value.append(1)
    holder.trainer = Holder(2)
    assert snapshot.changes() == []
    holder.value.append(1)
    assert paths(snapshot) == ["model.value"]
    assert not any("trainer" in path for path, _ in reachable(holder, ignored))


class EqualToInt(type):
    """Classes that say that they are ``int``."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(int)


class WithoutHash(type):
    def __eq__(cls, other):
        return cls is other

    __hash__ = None


@pytest.mark.parametrize("kind", [EqualToInt, WithoutHash])
def test_classes_are_told_apart_whatever_they_say(kind):
    holder = Holder(kind("Kept", (), {"number": 0})())
    snapshot = StateSnapshot(holder)
    holder.value.number = 1
    assert paths(snapshot) == ["model.value.number"]


def test_ignored_attributes_are_compared_where_that_is_asked_for_and_not_followed():
    holder = Holder([])
    holder.other = 0
    holder.value.append([])
    snapshot = StateSnapshot(holder, lambda owner, name: True, by_identity=lambda owner: ["value", "made"])
    holder.value[0].append(1)
    holder.other = 1
    assert snapshot.changes() == []
    holder.made = 1
    assert paths(snapshot) == ["model.made"]
    snapshot.refresh()
    holder.value.append(1)
    assert paths(snapshot) == ["model.value[]"]
    before, holder.made = vars(holder).copy(), 2
    assert [change.path for change in snapshot.restore()] == ["model.value[]"]
    assert vars(holder) == before
    snapshot.refresh()
    holder.value = [*holder.value]
    assert paths(snapshot) == ["model.value"]


class SaysAnotherName(str):
    def __str__(self):
        return "ignored"


@pytest.mark.parametrize("key", [3, SaysAnotherName("kept")])
def test_attributes_by_odd_keys_are_compared(key):
    holder = Holder([])
    vars(holder)[key] = 0
    snapshot = StateSnapshot(holder, lambda owner, name: name == "ignored")
    vars(holder)[key] = 1
    assert len(snapshot.changes()) == 1


def test_all_of_an_object_can_be_ignored():
    holder = Holder([Record()])
    snapshot = StateSnapshot(holder, lambda owner, name: isinstance(owner, Record))
    holder.value[0].items.append(1)
    holder.value[0].more = 1
    assert snapshot.changes() == []


def test_reachable_yields_each_object_once_by_its_shortest_path():
    shared = []
    holder = Holder([[shared]])
    holder.near = shared
    found = list(reachable(holder))
    assert [path for path, value in found if value is shared] == ["model.near"]
    assert len({id(value) for _, value in found}) == len(found)


TENSORS = {
    "float32": torch.randn(50, 300),
    "small": torch.randn(3),
    "0-dim": torch.tensor(1.5),
    "bool": torch.rand(200, 300) > 0.5,
    "bfloat16": torch.randn(40_001).bfloat16(),
    "float64": torch.randn(10_000).double(),
    "int64": torch.arange(10_000),
    "complex64": torch.randn(9_000, dtype=torch.complex64),
    "conjugate": torch.randn(9_000, dtype=torch.complex64).conj(),
    "channels last": torch.randn(20, 30, 8, 8).to(memory_format=torch.channels_last),
    "transposed": torch.randn(100, 300).t(),
    "with gaps": torch.randn(100, 300)[:, ::2],
    "even gaps": torch.randn(30_000, 4)[:, ::2],
    "bytes with gaps": torch.zeros(100_000, dtype=torch.uint8)[::2],
    "at an odd place": torch.randn(20_001)[1:],
    "expanded": torch.randn(300, 1).expand(300, 100),
}


@pytest.fixture(params=["on a CPU", "elsewhere"])
def _digest(request, monkeypatch):
    """The numbers of large arrays are compared by each of the two digests."""
    if request.param == "elsewhere":
        monkeypatch.setattr(contents, "_hash", contents._digests)


@pytest.mark.usefixtures("_digest")
@pytest.mark.parametrize("name", TENSORS)
def test_any_single_number_is_seen(name):
    tensor = TENSORS[name]
    holder = Holder([tensor])
    snapshot = StateSnapshot(holder)
    assert snapshot.changes() == []
    flat = [
        tuple(int(n) for n in np.unravel_index(i, tensor.shape)) for i in {0, tensor.numel() // 2, tensor.numel() - 1}
    ]
    for place in flat:
        old = tensor[place].clone()
        new = ~old if tensor.dtype is torch.bool else old + 1
        (tensor[:, 0] if name == "expanded" else tensor)[place[:1] if name == "expanded" else place] = new
        (change,) = snapshot.changes()
        assert (change.path, change.kind, change.source is tensor) == ("model.value[0]", "tensor", True)
        (tensor[:, 0] if name == "expanded" else tensor)[place[:1] if name == "expanded" else place] = old
        assert snapshot.changes() == []


ARRAYS = {
    "even gaps": np.zeros(80_000, np.float32)[::2],
    "another byte order": np.zeros(20_000, ">f4"),
    "long": np.zeros(5, np.longdouble),
    "at odd places": np.zeros(20_000, [("a", "u1"), ("b", "<f4")])["b"],
    "backwards": np.zeros(20_000)[::-1],
}


@pytest.mark.usefixtures("_digest")
@pytest.mark.parametrize("name", ARRAYS)
def test_so_it_is_in_arrays_of_numpy(name):
    array = ARRAYS[name]
    snapshot = StateSnapshot(Holder([array]))
    assert snapshot.changes() == []
    array[3] += 1
    assert paths(snapshot)[0] == "model.value[0]"  # before its base


@pytest.mark.usefixtures("_digest")
def test_a_number_that_all_places_share_is_seen():
    one = torch.ones(())
    snapshot = StateSnapshot(Holder([one.expand(200, 200)]))
    assert snapshot.changes() == []
    one += 1
    assert paths(snapshot) == ["model.value[0]"]


@pytest.mark.usefixtures("_digest")
@pytest.mark.parametrize("values", ["random", "one hot", "ones"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("width", [4096, 1000, 3])
@pytest.mark.parametrize("trick", ["swap", "two signs", "two signs of a row", "all signs", "two rows"])
def test_changes_that_cancel_in_a_plain_sum_are_seen(trick, width, dtype, values):
    rows = 12_000 // width + 4
    tensor = {"random": torch.randn(rows, width), "one hot": torch.eye(rows, width), "ones": torch.ones(rows, width)}
    x = tensor[values].to(dtype)
    x[0, 0] = 2
    before = x.clone()
    snapshot = StateSnapshot(Holder(x))
    if trick == "swap":
        x[[0, 1]] = x[[1, 0]]
    elif trick == "two signs":
        x[0, 0], x[1, 1] = -x[0, 0], -x[1, 1]
    elif trick == "two signs of a row":
        x[0, 0], x[0, 2] = -x[0, 0], -x[0, 2]
    elif trick == "all signs":
        x.neg_()
    else:
        x[:2].neg_()
    assert not torch.equal(x, before)
    assert paths(snapshot) == ["model.value"]


def test_what_is_compared_is_looked_at_once_and_a_later_write_is_found(monkeypatch):
    """A refresh takes the look of the comparison before it, so that a write in between is found by the next one."""
    model, looks, digest = nn.Linear(300, 300), [], contents._summary
    monkeypatch.setattr(contents, "_summary", lambda bits: looks.append(bits.numel()) or digest(bits))
    with torch.no_grad():
        snapshot = StateSnapshot(model)
        looks.clear()
        model.weight[0, 0] += 1
        assert [change.path for change in snapshot.changes()] == ["model.weight"]
        snapshot.refresh(as_compared=True)
        assert looks.count(300 * 300) == 1
        assert not snapshot.changes()
        looks.clear()
        model.weight[1, 1] += 1
        model.count = 1
        torch.set_flush_denormal(True)
        try:
            snapshot.refresh(as_compared=True)
            assert not looks
            found = {change.path for change in snapshot.changes()}
        finally:
            torch.set_flush_denormal(False)
        assert found == {"torch.set_flush_denormal", "model.count", "model.weight"}
        snapshot.refresh()
        assert not snapshot.changes()


def test_writes_that_autograd_does_not_count_are_seen():
    model = nn.Linear(100, 100)
    model.register_buffer("mean", torch.zeros(3))
    snapshot = StateSnapshot(model)
    model.weight.data[3, 4] += 1
    model.mean.numpy()[1] = 5
    assert paths(snapshot) == ["model.weight", "model.mean"]
    assert [change.source for change in snapshot.changes()] == [model.weight, model.mean]
    snapshot.refresh()
    assert snapshot.changes() == []
    model.bias.data = torch.zeros(100)
    assert paths(snapshot) == ["model.bias"]
    snapshot.refresh()
    model.bias.data = torch.zeros(100)
    assert snapshot.changes() == []


def test_the_buffers_that_a_layer_writes_are_named():
    model = nn.BatchNorm1d(3)
    snapshot = StateSnapshot(model)
    model(torch.randn(5, 3))
    assert paths(snapshot) == ["model.running_mean", "model.running_var", "model.num_batches_tracked"]


def test_tensors_that_share_storage_are_all_named():
    base = torch.zeros(20_000)
    snapshot = StateSnapshot(Holder([base, base[10:], base[:5]]))
    base[15] = 1
    assert paths(snapshot) == ["model.value[0]", "model.value[1]"]


def test_the_shape_of_a_tensor_is_state_and_a_gradient_that_is_ignored_is_not():
    tensor, parameter = torch.zeros(2, 3), nn.Parameter(torch.zeros(3))
    snapshot = StateSnapshot(Holder([tensor, parameter]), lambda owner, name: owner is parameter and name == "grad")
    tensor.resize_(3, 2)
    parameter.grad = torch.ones(3)
    assert paths(snapshot) == ["model.value[0]"]
    snapshot.refresh()
    assert snapshot.changes() == []
    tensor.resize_(6)
    assert paths(snapshot) == ["model.value[0]"]
    snapshot.refresh()
    assert snapshot.changes() == []
    tensor[5] = 1
    assert paths(snapshot) == ["model.value[0]"]


def test_tensors_without_memory_to_read_do_no_harm():
    with torch.inference_mode():
        inference = torch.zeros(3)
    sparse = torch.eye(3).to_sparse()
    odd = [
        sparse,
        torch.empty(3, device="meta"),
        torch.empty(0, 4),
        inference,
        torch.zeros(2, 0),
        nn.UninitializedParameter(),
    ]
    odd.append(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    odd.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    torch.func.vmap(lambda x: odd.append(x) or x)(torch.zeros(2, 2))
    snapshot = StateSnapshot(Holder(odd))
    assert snapshot.changes() == []
    with torch.inference_mode():
        inference[1] = 1
    sparse.mul_(2)
    assert set(paths(snapshot)) == {"model.value[3]", "model.value[0]"}


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("no")


def test_tensors_of_a_users_class_are_read_as_plain_ones():
    plain = torch.zeros(3)
    snapshot = StateSnapshot(Holder(plain.as_subclass(Refuses)))
    assert snapshot.changes() == []
    plain[0] = 1
    assert paths(snapshot) == ["model.value"]


def test_a_module_that_trains_without_remembering_has_no_changes():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.GroupNorm(1, 5), nn.Flatten(), nn.Dropout())
    snapshot = StateSnapshot(model)
    loss = model(torch.randn(2, 5, 4)).sum()
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert snapshot.changes() == []


def test_arrays_are_seen_also_behind_a_read_only_view():
    array, reverse = np.zeros(10_000), np.zeros(100)
    text = np.array(["a", "b"])
    snapshot = StateSnapshot(Holder([np.broadcast_to(array, (3, 10_000)), reverse[::-1], text]))
    assert snapshot.changes() == []
    array[7] = 1
    reverse[3] = 1
    text[0] = "c"
    assert set(paths(snapshot)) == {"model.value[0].base", "model.value[1]", "model.value[1].base", "model.value[2]"}
