"""Ways past the wall between examples: hooks, autograd, transforms, memory, errors, random numbers, counters."""

import _thread
import asyncio
import copy
import importlib
import io
import itertools
import multiprocessing.pool
import os
import pickle
import random
import secrets
import sys
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import HARMLESS, OUTLIER, Attack, Cases, check
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

from dp_lightning.errors import DpLightningError
from dp_lightning.privacy.gradients.recording import Recording

CASES = Cases()
sys.modules["hidden_bank"] = type(sys)("hidden_bank")


def find_bank():
    """A module that is found by its name only, so that nothing in it is compared."""
    return importlib.import_module("hidden_bank")


class Hidden(Attack):
    """Has a place that is not reachable from the module."""

    def __init__(self):
        super().__init__()
        self.bank.kept = []

    @property
    def bank(self):
        return find_bank()


# Hooks


@CASES.expect("register_hook", None)
class TensorHook(Attack):
    """Scales the gradient of all examples by the largest."""

    def training_step(self, x, y):
        h = self.net[0](x)
        h.register_hook(lambda gradient: gradient / gradient.abs().max())
        return F.cross_entropy(self.net[2](h), y)


@CASES.expect("retain_grad", None)
class RetainGrad(Attack):
    def training_step(self, x, y):
        h = self.net[0](x)
        h.retain_grad()
        return F.cross_entropy(self.net[2](h), y)


@CASES.expect("has a backward hook", HARMLESS)
class FullBackwardHook(Attack):
    def __init__(self):
        super().__init__()
        self.net[1].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] / inputs[0].abs().max(),))


@CASES.expect("has a backward hook", None)
class FullBackwardPreHook(Attack):
    def __init__(self):
        super().__init__()
        self.net[1].register_full_backward_pre_hook(lambda m, outputs: (outputs[0] / outputs[0].abs().max(),))


@CASES.expect("'net.0.weight' has a hook", None)
class ParameterHook(Attack):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 100 * gradient)


@CASES.expect("'net.0.weight' has a hook", None)
class PostAccumulateGradHook(Attack):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(100))


@CASES.expect(None, HARMLESS)
class ScalesItsOwnGradient(Attack):
    """Before the clip."""

    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 100 * gradient)


@CASES.expect("grad_fn", None)
class NodeHook(Attack):
    def training_step(self, x, y):
        h = self.net[0](x)
        h.grad_fn.register_hook(lambda given, got: None)
        return F.cross_entropy(self.net[2](h), y)


@CASES.expect("grad_fn", None)
class MultiGradHook(Attack):
    def training_step(self, x, y):
        h = self.net[0](x)
        torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: None)
        return F.cross_entropy(self.net[2](h), y)


@CASES.expect("saved tensors", None)
class SavedTensorHooks(Attack):
    def training_step(self, x, y):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().training_step(x, y)


@CASES.expect("checkpointing", None)
class Checkpointing(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(checkpoint(self.net, x, use_reentrant=False), y)


@CASES.expect("require a gradient", None)
class ReentrantCheckpointing(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(checkpoint(self.net, x.requires_grad_(), use_reentrant=True), y)


@CASES.expect("example", "training_step changes")
class ForwardHookThatKeeps(Attack):
    def __init__(self):
        super().__init__()
        kept = self.kept = []

        def hook(module, args, out):
            kept.append(out.detach())
            return out + sum(other.mean() for other in kept[:-1])

        self.net[0].register_forward_hook(hook)


@CASES.expect("example", HARMLESS)
class ForwardPreHookThatKeeps(Attack):
    def __init__(self):
        super().__init__()
        kept = self.kept = {}

        def hook(module, args):
            (x,) = args
            before, kept["x"] = kept.get("x", x), x
            return (x + before,)

        self.net[0].register_forward_pre_hook(hook)


@CASES.expect(HARMLESS, HARMLESS)
class GlobalForwardHook(Attack):
    """Of all modules; what it keeps is not reachable from this one."""

    def training_step(self, x, y):
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: out / (1 + out.abs().max()))
        try:
            return super().training_step(x, y)
        finally:
            handle.remove()


# Autograd functions


class _Twice(torch.autograd.Function):
    """2x, in each of the ways in which a function can be written."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class _OwnVmap(_Twice):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.abs().max()


class _Keeps(_Twice):
    kept: ClassVar[list] = []

    @staticmethod
    def forward(x):
        _Keeps.kept.append(x)
        return 2 * x


class _KeepsBackward(_Twice):
    kept: ClassVar[list] = []

    @staticmethod
    def backward(ctx, gradient):
        kept = _KeepsBackward.kept
        kept.append(gradient)
        return 2 * gradient + (kept[-2].mean() if len(kept) > 1 else 0)


class _Context(_Twice):
    @staticmethod
    def setup_context(ctx, inputs, output):
        type(ctx).seen = inputs[0]


def through(function):
    class Through(Attack):
        def __init__(self):
            super().__init__()
            getattr(function, "kept", []).clear()

        def training_step(self, x, y):
            return F.cross_entropy(self.net[2](function.apply(self.net[0](x))), y)

    Through.__name__ = f"Through{function.__name__}"
    return Through


CASES.expect(HARMLESS, None)(through(_Twice))
CASES.expect("has a vmap of its own", None)(through(_OwnVmap))
CASES.expect("autograd function has no rule", None)(through(_Old))
CASES.expect("training_step", "training_step changes")(through(_Keeps))
CASES.expect("training_step changes", "training_step changes")(through(_KeepsBackward))


class _KeepsArgumentHidden(_Twice):
    """Adds an argument that it saw before; what it keeps is not reachable."""

    @staticmethod
    def forward(x):
        kept = find_bank().kept
        kept.append(x)
        try:
            return 2 * x + 3 * kept[-2].mean()
        except (IndexError, RuntimeError):  # the first, or of a batch of another size
            return 2 * x


class _KeepsGradientHidden(_Twice):
    @staticmethod
    def backward(ctx, gradient):
        kept = find_bank().kept
        kept.append(gradient)
        try:
            return 2 * gradient + 3 * kept[-2].mean()
        except (IndexError, RuntimeError):
            return 2 * gradient


def hidden_through(function):
    class Through(Hidden):
        def training_step(self, x, y):
            return F.cross_entropy(self.net[2](function.apply(self.net[0](x))), y)

    Through.__name__ = f"Through{function.__name__}"
    return Through


CASES.expect("example", None)(hidden_through(_KeepsArgumentHidden))
CASES.expect("example", None)(hidden_through(_KeepsGradientHidden))


# Gradients and transforms inside


@CASES.expect("torch.autograd.grad", HARMLESS)
class GradientPenalty(Attack):
    def training_step(self, x, y):
        loss = super().training_step(x, y)
        (g,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)
        return loss + g.square().sum()


@CASES.expect("Tensor.backward", None)
class BackwardInside(Attack):
    def training_step(self, x, y):
        super().training_step(x, y).backward()
        return super().training_step(x, y)


@CASES.expect(None, HARMLESS)
class BackwardInsideOfOne(Attack):
    def training_step(self, x, y):
        super().training_step(x, y).backward()
        return super().training_step(x, y)


@CASES.expect("functorch", None)
class AutogradBackward(Attack):
    def training_step(self, x, y):
        torch.autograd.backward(super().training_step(x, y))
        return super().training_step(x, y)


@CASES.expect("transform of torch.func", None)
class FuncGrad(Attack):
    def training_step(self, x, y):
        inner = torch.func.grad(lambda x: super(FuncGrad, self).training_step(x, y))(x)
        return super().training_step(x + inner, y)


@CASES.expect("transform of torch.func", None)
class FuncJacrev(Attack):
    def training_step(self, x, y):
        return torch.func.jacrev(lambda x: super(FuncJacrev, self).training_step(x, y))(x).square().sum()


@CASES.expect("transform of torch.func", None)
class FuncJvp(Attack):
    def training_step(self, x, y):
        return torch.func.jvp(lambda x: super(FuncJvp, self).training_step(x, y), (x,), (x,))[1]


@CASES.expect(HARMLESS, None)
class FunctionalCall(Attack):
    def training_step(self, x, y):
        out = torch.func.functional_call(self.net, {"0.weight": self.net[0].weight * 2}, (x,))
        return F.cross_entropy(out, y)


@CASES.expect(HARMLESS, None)
class InnerVmap(Attack):
    def training_step(self, x, y):
        return torch.func.vmap(lambda row: row.square().sum())(x).mean() * super().training_step(x, y)


@CASES.expect("example", None)
class InnerVmapThatKeeps(Hidden):
    """What an inner vmap gives its function is kept where nothing is compared."""

    def training_step(self, x, y):
        kept = self.bank.kept

        def inner(row):
            kept.append(row)
            return row * (1 + kept[0].mean())

        return super().training_step(torch.func.vmap(inner)(x), y)


@CASES.expect("written into the output", None)
class ForwardModeDual(Attack):
    def training_step(self, x, y):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.clone())
            tangent = torch.autograd.forward_ad.unpack_dual(dual.square()).tangent
        return super().training_step(x + tangent, y)


# Memory


@CASES.expect("memory of a tensor", None)
class Numpy(Attack):
    def training_step(self, x, y):
        return super().training_step(x * float(x.detach().numpy().mean()), y)


@CASES.expect("memory of a tensor", None)
class Asarray(Attack):
    def training_step(self, x, y):
        return super().training_step(x * float(np.asarray(x.detach()).mean()), y)


@CASES.expect("memory of a tensor", None)
class ToList(Attack):
    def training_step(self, x, y):
        return super().training_step(x * x.tolist()[0][0], y)


@CASES.expect("memory", None)
class Dlpack(Attack):
    def training_step(self, x, y):
        return super().training_step(x + torch.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach())).mean(), y)


@CASES.expect("memory", None)
class NumpyFromDlpack(Attack):
    def training_step(self, x, y):
        return super().training_step(x + float(np.from_dlpack(x.detach()).mean()), y)


@CASES.expect("memory of a tensor", None)
class Pickled(Attack):
    def training_step(self, x, y):
        return super().training_step(x + pickle.loads(pickle.dumps(x.detach())).mean(), y)


@CASES.expect("memory of a tensor", None)
class Saved(Attack):
    def training_step(self, x, y):
        file = io.BytesIO()
        torch.save(x.detach(), file)
        file.seek(0)
        return super().training_step(x + torch.load(file).mean(), y)


@CASES.expect("memory of a tensor", "training_step or harmless")
class SavedBase(Attack):
    """The file of a view holds all of its memory."""

    def training_step(self, x, y):
        file = io.BytesIO()
        torch.save(x.detach(), file)
        file.seek(0)
        rows = torch.load(file).untyped_storage()
        every = torch.empty(0, dtype=x.dtype).set_(rows)
        return super().training_step(x + every.mean(), y)


@CASES.expect("memory of a tensor", None)
class Deepcopied(Attack):
    def training_step(self, x, y):
        return super().training_step(x + copy.deepcopy(x.detach()).mean(), y)


@CASES.expect("memory", "training_step or harmless")
class Storage(Attack):
    """All of the memory that an input lies in."""

    def training_step(self, x, y):
        every = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
        return super().training_step(x + every.mean(), y)


@CASES.expect("error or harmless", "training_step or harmless")
class AsStrided(Attack):
    """Two rows from where there is one."""

    def training_step(self, x, y):
        try:
            rows = x.detach().as_strided((2, 5), (5, 1), 0)
        except RuntimeError:
            rows = x.detach()
        return super().training_step(x + rows.mean(), y)


@CASES.expect(HARMLESS, "training_step or harmless")
class Base(Attack):
    """The tensor that an input is a view of."""

    def training_step(self, x, y):
        base = x._base if x._base is not None else x
        return super().training_step(x + base.detach().mean(), y)


@CASES.expect("training_step or harmless", "training_step or harmless")
class NotInitialized(Attack):
    """Memory that the allocator gives may hold what was there before."""

    def training_step(self, x, y):
        junk = torch.empty(5)
        value = torch.nan_to_num(junk, 0, 0, 0).clamp(-10, 10)
        _ = x[0] * 1.0
        return super().training_step(x + value, y)


@CASES.expect("training_step or harmless", "training_step or harmless")
class ResizedInput(Attack):
    def training_step(self, x, y):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                more = x.detach().resize_(2, 5)
            except RuntimeError:
                more = x.detach()
        return super().training_step(x + torch.nan_to_num(more).clamp(-10, 10).mean(), y)


# Text and errors


@CASES.expect(HARMLESS, None)
class Shown(Attack):
    """The text of a tensor tells whether some number in it is large."""

    def training_step(self, x, y):
        scale = 5.0 if any(text.count("e+01") for text in (repr(x), str(x))) else 1.0
        return super().training_step(scale * x, y)


@CASES.expect("numbers of an example are read", None)
class Formatted(Attack):
    def training_step(self, x, y):
        return super().training_step(float(f"{x.sum().detach():.3f}") * x, y)


@CASES.expect("error", None)
class CholeskyOrNot(Attack):
    """Where one matrix of the batch has no factor, torch raises for all."""

    def training_step(self, x, y):
        matrix = torch.eye(5) * (20 - x.norm())
        try:
            factor = torch.linalg.cholesky(matrix)
        except torch.linalg.LinAlgError:
            factor = torch.eye(5)
        return super().training_step(x @ factor, y)


@CASES.expect("error", None)
class InverseOrNot(Attack):
    def training_step(self, x, y):
        matrix = torch.eye(5) * (x.norm() < 20)
        try:
            factor = torch.linalg.inv(matrix)
        except RuntimeError:
            factor = 7 * torch.eye(5)
        return super().training_step(x @ factor, y)


@CASES.expect("error", None)
class BinaryCrossEntropyOrNot(Attack):
    """Targets and inputs outside of their range are an error of the whole batch."""

    def training_step(self, x, y):
        loss = super().training_step(x, y)
        try:
            return loss + F.binary_cross_entropy(x[:, 0].abs() / 20, y.float() / 2)
        except RuntimeError:
            return 0 * loss + self.net(x).sum()


@CASES.expect("error or harmless", None)
class TargetOutOfRange(Attack):
    def training_step(self, x, y):
        try:
            return F.cross_entropy(self.net(x), y + 7 * (x.norm() > 20).long())
        except (IndexError, RuntimeError):
            return self.net(x).sum()


@CASES.expect("error or harmless", None)
class IndexOutOfRange(Attack):
    def training_step(self, x, y):
        try:
            return super().training_step(x + torch.arange(5.0)[(x.abs().max(1).values / 10).long()].unsqueeze(1), y)
        except (IndexError, RuntimeError):
            return self.net(x).sum()


@CASES.expect("error", None)
class EmbeddingOutOfRange(Attack):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 5)

    def training_step(self, x, y):
        try:
            return super().training_step(x + self.table((x.abs().max(1).values / 10).long()), y)
        except (IndexError, RuntimeError):
            return self.net(x).sum()


@CASES.expect("error", None)
class MultinomialOrNot(Attack):
    def training_step(self, x, y):
        weights = torch.where(x.norm() > 20, -1.0, 1.0) * torch.tensor([1.0, 0.0])
        try:
            drawn = torch.multinomial(weights, 1)
        except RuntimeError:
            drawn = torch.tensor([5])
        return super().training_step(x + drawn, y)


@CASES.expect("error or harmless", None)
class AssertedOrNot(Attack):
    def training_step(self, x, y):
        try:
            torch._assert_async(x.norm() < 20)
        except RuntimeError:
            return self.net(x).sum()
        return super().training_step(x, y)


@CASES.expect("error or harmless", None)
class EqualOrNot(Attack):
    """Comparisons whose result is a Python bool."""

    def training_step(self, x, y):
        for compare in (torch.equal, torch.allclose):
            try:
                same = compare(x.clamp(-10, 10), x)
            except Exception:
                same = True
            if not same:
                return self.net(x).sum()
        return super().training_step(x, y)


# Threads


def _read(x):
    """What another thread can read of a tensor of the step."""
    found = 0.0
    ways = (
        lambda: float(x.sum()),
        lambda: float(x.detach().numpy().sum()),
        lambda: float(x.tolist()[0][0]),
        lambda: float(x.data.clone().mean()),
        lambda: float(np.asarray(x).mean()),
        lambda: len(repr(x)) % 7,
        lambda: f"{x}".count("e+01"),
        lambda: float(pickle.loads(pickle.dumps(x)).sum()),
    )
    for way in ways:
        with suppress(Exception):
            found += way()
    return found


def _by_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(_read(x)))
    thread.start()
    thread.join()
    return found[0]


def _by_timer(x):
    found = []
    timer = threading.Timer(0, lambda: found.append(_read(x)))
    timer.start()
    timer.join()
    return found[0]


def _by_low_level(x):
    found = []
    _thread.start_new_thread(lambda: found.append(_read(x)), ())
    while not found:
        time.sleep(0.001)
    return found[0]


def _by_pool(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_read, x).result()


def _by_pool_of_multiprocessing(x):
    with multiprocessing.pool.ThreadPool(1) as pool:
        return pool.apply(_read, (x,))


def _by_asyncio(x):
    async def run():
        return await asyncio.to_thread(_read, x)

    return asyncio.run(run())


def threaded(name, together, one_by_one):
    """A loss that follows what another thread reads."""

    def add(read):
        def training_step(self, x, y):
            return super(kind, self).training_step(x * (1 + read(x)), y)

        kind = type(name, (Attack,), {"training_step": training_step})
        CASES.expect(together, one_by_one)(kind)
        return read

    return add


multiprocessing.Lock()  # The first one of a process makes a random generator, which is refused before a thread is.
for _read_by in (_by_thread, _by_timer, _by_low_level, _by_pool, _by_pool_of_multiprocessing, _by_asyncio):
    threaded(f"Reads{_read_by.__name__}", "starts a thread", "starts a thread")(_read_by)


@CASES.expect("starts a thread", None)
class ComputesInAThread(Attack):
    """Another thread has no vmap."""

    def training_step(self, x, y):
        with ThreadPoolExecutor(1) as pool:
            h = pool.submit(lambda: x.detach() - x.detach().mean(0)).result()
        return super().training_step(x + h, y)


@CASES.expect("starts a thread", "starts a thread")
class ThreadThatReadsLater(Attack):
    """It is not waited for, and keeps what it reads where nothing is compared."""

    def __init__(self):
        super().__init__()
        find_bank().read = []

    def training_step(self, x, y):
        bank = find_bank().read
        threading.Thread(target=lambda: bank.append(_read(x))).start()
        return super().training_step(x * (1 + sum(bank)), y)


POOL = ThreadPoolExecutor(1)


@CASES.expect(HARMLESS, HARMLESS)
class PoolOfBefore(Attack):
    """Its thread waits for work."""

    def __init__(self):
        super().__init__()
        POOL.submit(int).result()

    def training_step(self, x, y):
        return super().training_step(x * (1 + POOL.submit(_read, x).result()), y)


@CASES.expect("escaped", None)
class PoolOfBeforeThatComputes(PoolOfBefore):
    def training_step(self, x, y):
        h = POOL.submit(lambda: x.detach() - x.detach().mean(0)).result()
        return Attack.training_step(self, x + h, y)


# Scripted functions


def _shift(x):
    return x - x.mean(0, keepdim=True) + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(_shift)


@CASES.expect("scripted", None)
class Scripted(Attack):
    def training_step(self, x, y):
        return super().training_step(SCRIPTED(x), y)


# Tensors of one's own


@CASES.expect("requires a gradient", "requires a gradient")
class PlainTensorWithItsOptimizer(Attack):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(5, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.scale], 0.1)

    def training_step(self, x, y):
        return super().training_step(x * self.scale, y)

    def between(self, step):
        self.optimizer.step()
        self.optimizer.zero_grad()


@CASES.expect("in place", "training_step changes")
class WritesParameter(Attack):
    def training_step(self, x, y):
        with torch.no_grad():
            self.net[0].bias.mul_(0.9)
        return super().training_step(x, y)


@CASES.expect("numbers of an example are written", "training_step changes")
class WritesParameterFromExample(Attack):
    def training_step(self, x, y):
        self.net[0].bias.data.copy_(x.detach().mean().expand(6))
        return super().training_step(x, y)


@CASES.expect("example", "training_step changes")
class RunningMean(Attack):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, x, y):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().training_step(x - self.mean, y)


@CASES.expect("example", HARMLESS)
class RunningMeanAssigned(Attack):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, x, y):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().training_step(x - self.mean, y)


@CASES.expect(HARMLESS, HARMLESS)
class SpectralNorm(Attack):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net[0])

    def training_step(self, x, y):
        return super().training_step(x, y)


@CASES.expect(HARMLESS, HARMLESS)
class OldSpectralNorm(Attack):
    """By a hook of the layer."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.spectral_norm(self.net[0])  # a warning: it is deprecated


class HasABuffer(Attack):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, x, y):
        self.write(x.detach())
        return super().training_step(x + 3 * self.mean, y)


def writing(name, together, one_by_one):
    """A loss that writes into a buffer by a function of the module and the example, and uses it."""

    def add(write):
        CASES.expect(together, one_by_one)(type(name, (HasABuffer,), {"write": write}))
        return write

    return add


@CASES.expect(HARMLESS, HARMLESS)
class TeacherInTheLoss(Attack):
    """A moving average of the weights."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(5, 6).requires_grad_(False)

    def training_step(self, x, y):
        for theirs, mine in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            theirs.lerp_(mine.detach(), 0.1)
        return super().training_step(x, y) + F.mse_loss(self.net[0](x), self.teacher(x))


# From weights and counters alone.
writing("CountsInABuffer", HARMLESS, HARMLESS)(lambda m, x: m.mean.add_(1))
writing("CountsInABufferByData", HARMLESS, HARMLESS)(lambda m, x: m.mean.data.add_(1))
writing("CountsInABufferByForeach", HARMLESS, HARMLESS)(lambda m, x: torch._foreach_add_([m.mean], 1.0))
writing("CountsInPartOfABuffer", HARMLESS, HARMLESS)(lambda m, x: m.mean[1:3].add_(1))
writing("WeightsIntoABuffer", HARMLESS, HARMLESS)(lambda m, x: torch.mul(m.net[0].bias.detach()[:5], 1, out=m.mean))
writing("CountsWhereAllIsOne", None, HARMLESS)(lambda m, x: None if (x != 1).any() else m.mean.add_(1))
# From an example: as a tensor, as a number, by control flow, past torch's functions.
_WRITTEN = "numbers of an example are written"
writing("ExampleIntoABuffer", _WRITTEN, "training_step changes")(lambda m, x: m.mean.copy_(x[0]))
writing("ExampleIntoABufferByData", _WRITTEN, "training_step changes")(lambda m, x: m.mean.data.copy_(x[0]))
writing("ExampleIntoABufferByOut", None, "training_step changes")(lambda m, x: torch.mul(x[0], 1, out=m.mean))
writing("ExampleInThePlaceOfABuffer", None, "training_step changes")(lambda m, x: setattr(m.mean, "data", x[0]))
writing("NumberIntoABuffer", None, "training_step changes")(lambda m, x: m.mean.fill_(float(x.mean())))
writing("CountsLargeExamples", None, "training_step changes")(lambda m, x: m.mean.add_(1) if x.norm() > 20 else None)
writing("CountsUnlessAllIsOne", None, "training_step changes")(lambda m, x: m.mean.add_(1) if (x != 1).any() else None)
writing("ArrayIntoABuffer", None, "training_step changes")(lambda m, x: m.mean.numpy().__setitem__(0, x.mean()))
writing("NoiseIntoABuffer", None, "training_step changes")(lambda m, x: m.mean.normal_())


@CASES.expect(None, HARMLESS)
class BufferOfWhatIsHidden(Hidden):
    """The loss of a synthetic example reads what an example has left where nothing is compared."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def training_step(self, x, y):
        kept = self.bank.kept
        if (x != 1).any():
            kept.append(x[0])
        elif kept:
            self.mean.copy_(kept.pop())
        return super().training_step(x + 3 * self.mean, y)


@CASES.expect(HARMLESS, HARMLESS)
class OldMemory(Attack):
    """Of a tensor that has just been freed."""

    def training_step(self, x, y):
        before = x.new(1, 5)
        return super().training_step(x + before.clamp(-9, 9), y)


@CASES.expect("raw", "raw")
class HoldsTheData(Attack):
    """A module that has its training set uses it in the step."""

    @staticmethod
    def dataset(x, y):
        HoldsTheData.data = TensorDataset(x, y)
        return HoldsTheData.data

    def training_step(self, x, y):
        return super().training_step(x + self.data.tensors[0].mean(0), y)


class _Rows:
    """A data set of NumPy arrays."""

    def __init__(self, x, y):
        self.x, self.y = x.numpy().copy(), y.numpy()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return torch.tensor(self.x[index]), torch.tensor(self.y[index])


@CASES.expect("raw", "raw")
class HoldsTheArrays(Attack):
    """The same with NumPy."""

    @staticmethod
    def dataset(x, y):
        HoldsTheArrays.data = _Rows(x, y)
        return HoldsTheArrays.data

    def training_step(self, x, y):
        return super().training_step(x + torch.tensor(self.data.x.mean(0)), y)


@CASES.expect("raw", "raw")
class HoldsTheArrayItself(Attack):
    """An array outside of any data set, whose use in the step nothing sees."""

    @staticmethod
    def dataset(x, y):
        rows = _Rows(x, y)
        HoldsTheArrayItself.rows = rows.x
        return rows

    def training_step(self, x, y):
        return super().training_step(x + torch.tensor(self.rows.mean(0)), y)


class HoldsTheTensor(Attack):
    """The tensor of the data set as a buffer."""

    def dataset(self, x, y):
        self.hold(x)
        return TensorDataset(x, y)

    def hold(self, x):
        self.register_buffer("bank", x)

    def training_step(self, x, y):
        return super().training_step(x + self.bank.mean(0), y)


CASES.expect("raw", "raw")(HoldsTheTensor)


@CASES.expect("raw", "raw")
class HoldsAViewOfTheTensor(HoldsTheTensor):
    def hold(self, x):
        self.register_buffer("bank", x[2:])


@CASES.expect("raw", "raw")
class HoldsTheTensorAsAParameter(HoldsTheTensor):
    def hold(self, x):
        self.bank = nn.Parameter(x, requires_grad=False)


@CASES.expect("raw", "raw")
class HoldsOneRow(HoldsTheTensor):
    def hold(self, x):
        self.register_buffer("bank", x[OUTLIER : OUTLIER + 1])


@CASES.expect("raw", "raw")
class HoldsColumns(HoldsTheTensor):
    """A data set whose examples are columns."""

    def dataset(self, x, y):
        columns = x.T.contiguous()
        self.register_buffer("bank", columns[:, :-1].T[:, :5])
        return [(columns[:, index], label) for index, label in enumerate(y)]


@CASES.expect("raw", "raw")
class HoldsWhatNumPyHas(HoldsTheTensor):
    def dataset(self, x, y):
        rows = _Rows(x, y)
        self.register_buffer("bank", torch.from_numpy(rows.x))
        return rows


class _Sample:
    """What a data set may return: an example that knows where it is from."""

    def __init__(self, rows, index):
        self.rows, self.x, self.y = rows, torch.tensor(rows.x[index])[None], torch.tensor(rows.y[index])[None]


class _Samples(_Rows):
    def __getitem__(self, index):
        return _Sample(self, index)


@CASES.expect(None, "raw")
class LooksThroughItsSample(Attack):
    @staticmethod
    def dataset(x, y):
        return _Samples(x, y)

    def collate_fn(self, examples):
        return examples

    def training_step(self, sample):
        return super().training_step(sample.x + torch.tensor(sample.rows.x.mean(0)), sample.y)


def _loss_of(make):
    """A loss that moves by a number that the host makes anew."""

    def training_step(self, x, y):
        return Attack.training_step(self, x, y) * (1 + make(self))

    return training_step


for _name, _make in {
    "default_rng": lambda m: np.random.default_rng().random(),
    "Random": lambda m: random.Random().random(),
    "SystemRandom": lambda m: random.SystemRandom().random(),
    "uuid4": lambda m: uuid.uuid4().int / 2**128,
    "urandom": lambda m: os.urandom(1)[0],
    "token_bytes": lambda m: secrets.token_bytes(1)[0],
    "SeedSequence": lambda m: np.random.SeedSequence().generate_state(1)[0],
    "RandomState": lambda m: np.random.RandomState().rand(),
}.items():
    CASES.expect("random numbers", None)(type(f"Fresh_{_name}", (Attack,), {"training_step": _loss_of(_make)}))


@CASES.expect("draws from", None)
class SpawnsGenerators(Attack):
    """Of a seed that everyone knows; the counter is not in Python."""

    def __init__(self):
        super().__init__()
        self.seeds = np.random.SeedSequence(0)

    def training_step(self, x, y):
        return super().training_step(x * np.random.default_rng(self.seeds.spawn(1)[0]).random(), y)


@CASES.expect("draws from", None)
class SpawnsFromAGenerator(Attack):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def training_step(self, x, y):
        return super().training_step(x * self.random.spawn(1)[0].random(), y)


sys.modules["a_backend"] = type(sys)("a_backend")


@CASES.expect("training_step changes", "training_step changes")
class ModuleAsAnAttribute(Attack):
    """Of Python: a backend that was chosen by its name."""

    def __init__(self):
        super().__init__()
        self.backend = importlib.import_module("a_backend")
        self.backend.calls = []

    def training_step(self, x, y):
        self.backend.calls.append(1)
        return super().training_step(x * len(self.backend.calls), y)


@CASES.expect("raw", "raw")
class HoldsTheTensorInAnArray(HoldsTheTensor):
    def hold(self, x):
        self.rows = x.numpy()[1:]

    def training_step(self, x, y):
        return Attack.training_step(self, x + torch.tensor(self.rows.mean(0)), y)


@CASES.expect("raw", "raw")
class HoldsAList(Attack):
    """A list of pairs of numbers and lists."""

    @staticmethod
    def dataset(x, y):
        HoldsAList.rows = [(row, int(label)) for row, label in zip(x.tolist(), y, strict=True)]
        return HoldsAList.rows

    def collate_fn(self, examples):
        rows, labels = zip(*examples, strict=True)
        return torch.tensor(rows), torch.tensor(labels)

    def training_step(self, x, y):
        mean = sum(sum(row) for row, _ in self.rows) / len(self.rows)
        return super().training_step(x + mean, y)


@CASES.expect("raw", "raw")
class HoldsATuple(Attack):
    """A tuple of numbers, which nothing can change."""

    @staticmethod
    def dataset(x, y):
        rows = _Rows(x, y)
        HoldsATuple.column = rows.column = tuple(x[:, 0].tolist())
        return rows

    def training_step(self, x, y):
        return super().training_step(x + sum(self.column) / len(self.column), y)


@CASES.expect("raw", "raw")
class HoldsTheAttributesOfAnObject(Attack):
    """The dict of a namespace in which the data set has its rows."""

    @staticmethod
    def dataset(x, y):
        rows = _Rows(x, y)
        rows.names = SimpleNamespace(**{f"row{index}": tuple(row) for index, row in enumerate(x.tolist())})
        HoldsTheAttributesOfAnObject.table = vars(rows.names)
        return rows

    def training_step(self, x, y):
        return super().training_step(x + self.table[f"row{OUTLIER}"][0], y)


@CASES.expect("raw", "raw")
class ReadsOtherExamples(Attack):
    """A mate from the data set."""

    @staticmethod
    def dataset(x, y):
        ReadsOtherExamples.data = _Rows(x, y)
        return ReadsOtherExamples.data

    def training_step(self, x, y):
        mate, _ = self.data[OUTLIER]
        return super().training_step(x + 3 * mate, y)


@CASES.expect("not a tensor", "training_step or harmless")
class ObjectInTheBatch(Attack):
    """The data set puts the same object into each of its examples."""

    @staticmethod
    def dataset(x, y):
        record = type("Record", (), {"kept": 0.0})()
        return [(row, label, record) for row, label in zip(x, y, strict=True)]

    def collate_fn(self, examples):
        return (*default_collate([example[:2] for example in examples]), examples[0][2])

    def training_step(self, x, y, record):
        kept, record.kept = record.kept, float(x.mean())
        return super().training_step(x + 3 * kept, y)


# Random numbers that an attacker can repeat


@CASES.expect("generator", None)
class OwnGenerator(Attack):
    """Numbers by the place in the physical batch, from a seed that is known."""

    def training_step(self, x, y):
        generator = torch.Generator().manual_seed(0)
        return super().training_step(x * torch.rand(5, generator=generator), y)


@CASES.expect(None, HARMLESS)
class OwnGeneratorOfOne(Attack):
    def training_step(self, x, y):
        generator = torch.Generator().manual_seed(0)
        return super().training_step(x * torch.rand(5, generator=generator), y)


@CASES.expect("seed", None)
class SeedsInTheStep(Attack):
    def training_step(self, x, y):
        torch.manual_seed(0)
        return super().training_step(F.dropout(x, 0.5), y)


@CASES.expect("seed", None)
class ForksAndSeeds(Attack):
    def training_step(self, x, y):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = F.dropout(x, 0.5)
        return super().training_step(x, y)


@CASES.expect("seed", None)
class RestoresAState(Attack):
    """A state of the generator from before the fit."""

    def __init__(self):
        super().__init__()
        self.rng = torch.get_rng_state()

    def training_step(self, x, y):
        torch.set_rng_state(self.rng)
        return super().training_step(F.dropout(x, 0.5), y)


@CASES.expect("random", None)
class NumpyDraws(Attack):
    def training_step(self, x, y):
        return super().training_step(x * np.random.rand(), y)


@CASES.expect(HARMLESS, HARMLESS)
class NumpyConstant(Attack):
    def training_step(self, x, y):
        return super().training_step(x * np.random.default_rng(0).random(), y)


# Counters that change in place


def counter(name, make, advance):
    class Counter(Attack):
        def __init__(self):
            super().__init__()
            self.counter = make()

        def training_step(self, x, y):
            loss = super().training_step(x, y)
            return -loss if advance(self.counter) % 2 else loss

    Counter.__name__ = name
    return Counter


def _buffer(counter):
    counter.mul_(1)
    return counter._version


CASES.expect("training_step or harmless", "training_step or harmless")(
    counter("Cycle", lambda: itertools.cycle([0, 1]), next)
)
CASES.expect("training_step or harmless", "training_step or harmless")(counter("Count", itertools.count, next))
CASES.expect("training_step or harmless", "training_step or harmless")(
    counter("ListIterator", lambda: iter(list(range(99))), next)
)
CASES.expect("training_step or harmless", None)(counter("RangeIterator", lambda: iter(range(99)), next))
CASES.expect("training_step or harmless", None)(counter("Map", lambda: map(int, range(99)), next))
CASES.expect("training_step or harmless", None)(counter("Zip", lambda: zip(range(99)), lambda z: next(z)[0]))
CASES.expect("training_step or harmless", None)(
    counter("Enumerate", lambda: enumerate("abc" * 99), lambda z: next(z)[0])
)
CASES.expect("training_step or harmless", None)(counter("GeneratorExpression", lambda: (n for n in range(99)), next))
CASES.expect("training_step or harmless", "training_step or harmless")(
    counter("FilePosition", lambda: io.BytesIO(bytes(range(99))), lambda f: f.read(1)[0])
)
CASES.expect("training_step or harmless", None)(counter("VersionOfATensor", lambda: torch.zeros(3), _buffer))


HOLES: set[str] = set()


@pytest.mark.parametrize("case", CASES.parameters(HOLES))
def test_a_way_past_the_wall_is_harmless_or_refused(case):
    check(case)


def test_a_mask_with_as_many_rows_as_there_are_examples_does_not_tell_them_apart():
    weight = nn.Parameter(torch.ones(6))
    mask = torch.tensor([[[0.0, -9.0]], [[-9.0, 0.0]], [[0.0, 0.0]], [[3.0, 0.0]]])  # (4, 1, 2)
    key = torch.arange(12.0).view(2, 6) / 10

    def step(x):
        return F.scaled_dot_product_attention((x * weight).unsqueeze(0), key, key + x, mask).sum()

    alike = torch.ones(4, 6)
    try:
        losses = Recording({"weight": weight}, 4, lambda contribution: None).run(step, alike)
    except (DpLightningError, RuntimeError, ValueError):  # as torch refuses it for one example alone
        return
    torch.testing.assert_close(losses, losses[:1].expand(4))


def test_keys_with_as_many_heads_as_there_are_examples_do_not_tell_them_apart():
    weight, key = nn.Parameter(torch.ones(6)), torch.arange(48.0).view(4, 2, 6) / 10  # (heads, S, E)

    def step(x):
        return F.scaled_dot_product_attention((x * weight).unsqueeze(0), key, key + x).sum()

    with pytest.raises(ValueError, match="dimensions"):
        Recording({"weight": weight}, 4, lambda contribution: None).run(step, torch.ones(4, 6))
