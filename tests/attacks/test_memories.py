"""Places of a program that can keep something of one example for another one.

``KeepsTensors`` keeps the hidden layer and adds what it kept last to the next. ``KeepsNumbers`` does so with the number
of one example, which only code that sees its value can do. ``CountsCalls`` keeps no example: every second call has
another loss, and how many calls there are depends on the draw.
"""

import array
import builtins
import collections
import contextvars
import functools
import io
import itertools
import logging
import os
import queue
import random
import sys
import threading
import types
import weakref
from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import Attack, Case, Cases, check
from torch.nn import functional as F


class Place:
    """Keeps one thing at a time: ``put`` and ``get``, which gives None before the first."""

    def make(self, module):
        """Called in the constructor of the module."""

    def put(self, module, value):
        raise NotImplementedError

    def get(self, module):
        raise NotImplementedError


class Of(Place):
    """A container that ``holder`` gives for a module."""

    def __init__(self, start, holder):
        self.start, self.holder = start, holder

    def make(self, module):
        self.start(module)

    def put(self, module, value):
        self.holder(module).append(value)

    def get(self, module):
        kept = self.holder(module)
        return kept[-1] if len(kept) else None


class Attribute(Place):
    """An attribute of an object that ``owner`` gives for a module."""

    def __init__(self, owner, name="kept_by_attack"):
        self.owner, self.name = owner, name

    def make(self, module):
        with suppress(AttributeError, TypeError):
            delattr(self.owner(module), self.name)

    def put(self, module, value):
        setattr(self.owner(module), self.name, value)

    def get(self, module):
        return getattr(self.owner(module), self.name, None)


class Made(Place):
    """Functions for making, putting and getting."""

    def __init__(self, put, get, make=lambda module: None):
        self.functions = make, put, get

    def make(self, module):
        self.functions[0](module)

    def put(self, module, value):
        self.functions[1](module, value)

    def get(self, module):
        return self.functions[2](module)


GLOBAL_LIST = []
VARIABLE = contextvars.ContextVar("attack", default=None)
LOCAL = threading.local()
WEAK = weakref.WeakValueDictionary()


class Holder:
    """Can be referred to weakly."""


class Slotted:
    __slots__ = ("kept_by_attack",)


class Class:
    kept: ClassVar[list] = []


def default(value=None, kept=[]):  # noqa: B006
    if value is not None:
        kept.append(value)
    return kept


@functools.lru_cache
def cached(key):
    return []


def coroutine():
    kept = None
    while True:
        value = yield kept
        kept = kept if value is None else value


def started():
    generator = coroutine()
    next(generator)
    return generator


def closure():
    kept = None

    def put(value):
        nonlocal kept
        kept = value

    return put, lambda: kept


def set_attribute(name, value):
    return lambda module: setattr(module, name, value())


def _raise(value):
    raise ValueError(value)


def remember_exception(module, value):
    try:
        _raise(value)
    except ValueError as error:
        module.last_error = error


def simple_queue_get(module):
    return module.queue.get() if not module.queue.empty() else None


def hook_with(module, value):
    if hasattr(module, "handle"):
        module.handle.remove()
    module.handle = module.net[1].register_forward_hook(lambda m, args, out: None)
    module.net[1]._forward_hooks[module.handle.id] = functools.partial(lambda kept, m, args, out: None, value)


def hook_get(module):
    hooks = list(module.net[1]._forward_hooks.values())
    return hooks[-1].args[0] if hooks else None


def swap_forward(module, value):
    forward = types.MethodType(type(module.net[2]).forward, module.net[2])
    module.net[2].forward = functools.partial(lambda kept, x: forward(x), value)


def swapped(module):
    forward = vars(module.net[2]).get("forward")
    return None if forward is None else forward.args[0]


PLACES = {
    "list of the module": Of(set_attribute("bank", list), lambda m: m.bank),
    "deque of the module": Of(set_attribute("bank", collections.deque), lambda m: m.bank),
    "UserList": Of(set_attribute("bank", collections.UserList), lambda m: m.bank),
    "attribute of the module": Attribute(lambda m: m),
    "attribute of a layer": Attribute(lambda m: m.net[0]),
    "attribute of a parameter": Attribute(lambda m: m.net[0].weight),
    "dictionary": Made(lambda m, v: m.bank.__setitem__("a", v), lambda m: m.bank.get("a"), set_attribute("bank", dict)),
    "nested dictionary": Made(
        lambda m, v: m.bank["a"][0].__setitem__("b", v),
        lambda m: m.bank["a"][0].get("b"),
        set_attribute("bank", lambda: {"a": [{}]}),
    ),
    "set": Made(
        lambda m, v: (m.bank.clear(), m.bank.add(v)),
        lambda m: next(iter(m.bank), None),
        set_attribute("bank", set),
    ),
    "attribute of the class": Attribute(type),
    "attribute of another class": Of(lambda m: Class.kept.clear(), lambda m: Class.kept),
    "slot": Made(
        lambda m, v: setattr(m.slotted, "kept_by_attack", v),
        lambda m: getattr(m.slotted, "kept_by_attack", None),
        set_attribute("slotted", Slotted),
    ),
    "namespace": Made(
        lambda m, v: setattr(m.space, "kept", v),
        lambda m: getattr(m.space, "kept", None),
        set_attribute("space", types.SimpleNamespace),
    ),
    "global list": Of(lambda m: GLOBAL_LIST.clear(), lambda m: GLOBAL_LIST),
    "default of a function": Of(lambda m: default().clear(), lambda m: default()),
    "attribute of a function": Attribute(lambda m: default),
    "functools.lru_cache": Of(lambda m: cached.cache_clear(), lambda m: cached(0)),
    "closure": Made(
        lambda m, v: m.put(v),
        lambda m: m.get(),
        lambda m: m.__dict__.update(zip(("put", "get"), closure(), strict=True)),
    ),
    "functools.partial": Of(set_attribute("call", lambda: functools.partial(max, [])), lambda m: m.call.args[0]),
    "generator": Made(
        lambda m, v: m.generator.send(v), lambda m: m.generator.send(None), set_attribute("generator", started)
    ),
    "NumPy array of objects": Made(
        lambda m, v: m.bank.__setitem__(0, v),
        lambda m: m.bank[0],
        set_attribute("bank", lambda: np.array([None, 1], dtype=object)),
    ),
    "weak dictionary": Made(
        lambda m, v: (setattr(m, "strong", Holder()), setattr(m.strong, "kept", v), WEAK.__setitem__("a", m.strong)),
        lambda m: getattr(WEAK.get("a"), "kept", None),
        lambda m: WEAK.clear(),
    ),
    "thread-local": Made(
        lambda m, v: setattr(LOCAL, "kept", v), lambda m: getattr(LOCAL, "kept", None), lambda m: vars(LOCAL).clear()
    ),
    "context variable": Made(lambda m, v: VARIABLE.set(v), lambda m: VARIABLE.get(), lambda m: VARIABLE.set(None)),
    "sys.modules": Attribute(lambda m: sys.modules[__name__]),
    "torch.nn.functional": Attribute(lambda m: F),
    "torch.nn.Linear": Attribute(lambda m: torch.nn.Linear),
    "builtins": Attribute(lambda m: builtins),
    "logger": Attribute(lambda m: logging.getLogger("attack")),
    "exception": Made(
        remember_exception,
        lambda m: None if m.last_error is None else m.last_error.args[0],
        set_attribute("last_error", lambda: None),
    ),
    "traceback of a global exception": Made(
        lambda m, v: _keep_error(v), lambda m: None if not ERRORS else ERRORS[-1].args[0], lambda m: ERRORS.clear()
    ),
    "queue.Queue": Made(
        lambda m, v: m.queue.put(v),
        lambda m: m.queue.get() if not m.queue.empty() else None,
        set_attribute("queue", queue.Queue),
    ),
    "queue.SimpleQueue": Made(lambda m, v: m.queue.put(v), simple_queue_get, set_attribute("queue", queue.SimpleQueue)),
    "iterator over a list": Made(
        lambda m, v: setattr(m, "iterator", iter([v])),
        lambda m: next(m.iterator, None),
        set_attribute("iterator", lambda: iter([])),
    ),
    "itertools.cycle": Made(
        lambda m, v: m.held.__setitem__(0, itertools.cycle([v])),
        lambda m: next(m.held[0]),
        set_attribute("held", lambda: [itertools.cycle([None])]),
    ),
    "forward hook": Made(hook_with, hook_get),
    "method swapped in": Made(swap_forward, swapped),
    "gradient of a buffer": Made(
        lambda m, v: setattr(m.mean, "grad", v.detach() if isinstance(v, torch.Tensor) else torch.full((6,), v)),
        lambda m: m.mean.grad,
        lambda m: m.register_buffer("mean", torch.zeros(6)),
    ),
    "gradient of a parameter": Made(
        lambda m, v: setattr(m.net[0].bias, "grad", v.detach() if isinstance(v, torch.Tensor) else torch.full((6,), v)),
        lambda m: m.net[0].bias.grad,
    ),
    "state of an optimizer": Made(
        lambda m, v: m.optimizer.state[m.net[0].weight].__setitem__("kept", v),
        lambda m: m.optimizer.state[m.net[0].weight].get("kept"),
        lambda m: m.__dict__.__setitem__("optimizer", torch.optim.SGD(m.net.parameters(), 0.1)),
    ),
    "new buffer": Made(
        lambda m, v: m.register_buffer("fresh", torch.as_tensor(v).detach(), persistent=False),
        lambda m: getattr(m, "fresh", None),
    ),
}
ERRORS = []


def _keep_error(value):
    try:
        _raise(value)
    except ValueError as error:
        ERRORS.append(error)


def _written(module):
    text = module.file.getvalue()
    return float(text.split()[-1]) if text.split() else None


LIBRARIES = (torch._C._BlasBackend.Cublas, torch._C._BlasBackend.Cublaslt)
#: Places that keep a number and no tensor.
OF_NUMBERS = {
    "os.environ": Made(
        lambda m, v: os.environ.__setitem__("ATTACK", repr(v)),
        lambda m: float(os.environ["ATTACK"]) if "ATTACK" in os.environ else None,
        lambda m: os.environ.pop("ATTACK", None),
    ),
    "string buffer": Made(lambda m, v: m.file.write(f" {v}"), _written, set_attribute("file", io.StringIO)),
    "byte buffer": Made(
        lambda m, v: m.file.write(f" {v}".encode()),
        lambda m: float(m.file.getvalue().split()[-1]) if m.file.getvalue() else None,
        set_attribute("file", io.BytesIO),
    ),
    "array.array": Made(
        lambda m, v: m.kept.__setitem__(0, v),
        lambda m: m.kept[0],
        set_attribute("kept", lambda: array.array("d", [0.0])),
    ),
    "bytearray": Made(
        lambda m, v: m.kept.__setitem__(slice(0, 8), np.float64(v).tobytes()),
        lambda m: float(np.frombuffer(m.kept, dtype=np.float64)[0]),
        set_attribute("kept", lambda: bytearray(8)),
    ),
    "NumPy array": Made(
        lambda m, v: m.kept.__setitem__(0, v), lambda m: float(m.kept[0]), set_attribute("kept", lambda: np.zeros(3))
    ),
    "view of a NumPy array": Made(
        lambda m, v: m.kept[::-2].__setitem__(0, v),
        lambda m: float(m.kept[2]),
        set_attribute("kept", lambda: np.zeros(3)),
    ),
    "buffer of the module": Made(
        lambda m, v: m.mean.fill_(v), lambda m: float(m.mean[0]), lambda m: m.register_buffer("mean", torch.zeros(3))
    ),
    "buffer through data": Made(
        lambda m, v: m.mean.data.fill_(v),
        lambda m: float(m.mean[0]),
        lambda m: m.register_buffer("mean", torch.zeros(3)),
    ),
    "buffer through numpy": Made(
        lambda m, v: m.mean.numpy().fill(v),
        lambda m: float(m.mean[0]),
        lambda m: m.register_buffer("mean", torch.zeros(3)),
    ),
    "buffer through its storage": Made(
        lambda m, v: m.mean.untyped_storage().copy_(torch.full((3,), v).untyped_storage()),
        lambda m: float(m.mean[0]),
        lambda m: m.register_buffer("mean", torch.zeros(3)),
    ),
    "buffer that shares memory": Made(
        lambda m, v: m.mean.fill_(v),
        lambda m: float(m.mean[0]),
        lambda m: m.register_buffer("mean", torch.zeros(3).share_memory_()),
    ),
    "tensor over a NumPy array": Made(
        lambda m, v: m.array.fill(v),
        lambda m: float(m.tensor[0]),
        lambda m: (setattr(m, "array", np.zeros(3)), setattr(m, "tensor", torch.from_numpy(m.array))),
    ),
    "frozen parameter": Made(
        lambda m, v: m.frozen.data.fill_(v),
        lambda m: float(m.frozen[0]),
        lambda m: setattr(m, "frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
    ),
    "seed of a generator": Made(
        lambda m, v: m.generator.manual_seed(int(1000 * abs(v))),
        lambda m: seed % 1000 if (seed := m.generator.initial_seed()) < 2**40 else 0,  # a fresh key is no seed of ours
        lambda m: setattr(m, "generator", torch.Generator()),
    ),
    "seed of Python": Made(
        lambda m, v: random.seed(int(abs(v)) % 2),
        lambda m: {random.Random(seed).random(): float(seed) for seed in range(2)}.get(random.random()),
    ),
    "seed of torch": Made(
        lambda m, v: torch.manual_seed(int(abs(v)) % 2),
        lambda m: {seed: float(seed) for seed in range(2)}.get(torch.initial_seed()),
    ),
    "training mode": Made(lambda m, v: m.net.train(v > 0), lambda m: 1.0 * m.net.training),
    "requires_grad": Made(
        lambda m, v: m.frozen.requires_grad_(v > 0),
        lambda m: 1.0 * m.frozen.requires_grad,
        lambda m: setattr(m, "frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
    ),
    "default dtype": Made(
        lambda m, v: torch.set_default_dtype(torch.float64 if v > 0 else torch.float32),
        lambda m: float(torch.get_default_dtype() == torch.float64),
        lambda m: torch.set_default_dtype(torch.float32),
    ),
    "number of threads": Made(
        lambda m, v: torch.set_num_threads(1 + int(v > 0)),
        lambda m: torch.get_num_threads() - 1.0,
        lambda m: torch.set_num_threads(1),
    ),
    "deterministic algorithms": Made(
        lambda m, v: torch.use_deterministic_algorithms(v > 0),
        lambda m: 1.0 * torch.are_deterministic_algorithms_enabled(),
        lambda m: torch.use_deterministic_algorithms(False),
    ),
    "precision of products": Made(
        lambda m, v: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16" if v > 0 else "none"),
        lambda m: 1.0 * (torch.backends.mkldnn.conv.fp32_precision == "bf16"),
        lambda m: setattr(torch.backends.mkldnn.conv, "fp32_precision", "none"),
    ),
    "kernels of attention": Made(
        lambda m, v: torch.backends.cuda.enable_math_sdp(v > 0),
        lambda m: 1.0 * torch.backends.cuda.math_sdp_enabled(),
        lambda m: torch.backends.cuda.enable_math_sdp(False),
    ),
    "library of products": Made(
        lambda m, v: torch._C._set_blas_preferred_backend(LIBRARIES[v > 0]),
        lambda m: 1.0 * (torch._C._get_blas_preferred_backend() == LIBRARIES[1]),
        lambda m: torch._C._set_blas_preferred_backend(LIBRARIES[0]),
    ),
    "small numbers": Made(
        lambda m, v: torch.set_flush_denormal(v > 0),
        lambda m: 1.0 * (float(torch.tensor(5e-324, dtype=torch.float64) * 1.0) == 0),
        lambda m: torch.set_flush_denormal(False),
    ),
    "recursion limit": Made(
        lambda m, v: sys.setrecursionlimit(3000 + int(v > 0)),
        lambda m: sys.getrecursionlimit() - 3000.0,
        lambda m: sys.setrecursionlimit(3000),
    ),
}


def keeping(place, *, numbers):
    """A module whose hidden layer depends on what the place has kept."""

    class Keeping(Attack):
        def __init__(self):
            super().__init__()
            place.make(self)

        def training_step(self, x, y):
            h = self.net[1](self.net[0](x))
            kept = place.get(self)
            place.put(self, float(h.sum().detach()) if numbers else h.detach().mean(0))
            if kept is not None:
                h = h + (3 * kept if numbers else 3 * kept.mean())
            return F.cross_entropy(self.net[2](h), y)

    return Keeping


def _number(value):
    if value is None:
        return 0
    return value.flatten()[0] if isinstance(value, torch.Tensor) else value


def counting(place):
    """A module with another loss in every second call."""

    class Counting(Attack):
        def __init__(self):
            super().__init__()
            place.make(self)

        def training_step(self, x, y):
            count = int(_number(place.get(self)))
            place.put(self, float(count + 1))
            loss = super().training_step(x, y)
            return -loss if count % 2 else loss

    return Counting


CASES = Cases()
_CHANGES = "training_step or harmless"
for _name, _place in PLACES.items():
    CASES.append(Case(f"tensor in {_name}", keeping(_place, numbers=False), "together", _CHANGES))
    CASES.append(Case(f"tensor in {_name}", keeping(_place, numbers=False), "one_by_one", _CHANGES))
for _name, _place in {**PLACES, **OF_NUMBERS}.items():
    CASES.append(Case(f"number in {_name}", keeping(_place, numbers=True), "one_by_one", _CHANGES))
    CASES.append(Case(f"count in {_name}", counting(_place), "together", _CHANGES))

HOLES: set[str] = set()


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch):
    limit, threads = sys.getrecursionlimit(), torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.conv.fp32_precision = "none"
    torch.backends.cuda.enable_math_sdp(True)
    torch._C._set_blas_preferred_backend(LIBRARIES[0])
    torch.set_flush_denormal(False)
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("case", CASES.parameters(HOLES))
def test_a_place_keeps_nothing_for_another_example(case):
    check(case)
