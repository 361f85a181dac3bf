"""How many operations a private step has, and how often it waits for the device, on tensors without memory.

Each operation starts a kernel on a GPU, for which small models wait; every number that is read makes the host wait.
"""

import contextlib
import warnings
from collections import Counter

import pytest
import timm
import torch
from devices import OneDevice
from small_steps import SIZE, private_step
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dp_lightning.models import WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.reading import Reading
from dp_lightning.ranks import Ranks

MODELS = {
    "WRN-16-4": (lambda: WideResNet(16, 4, 10), (3, 32, 32)),
    "ViT-S/16": (lambda: timm.create_model("vit_small_patch16_224", num_classes=10), (3, 224, 224)),
}
# Allocations, and operations on shapes alone.
_NO_KERNEL = ("empty", "detach", "view", "reshape", "promote_types", "lift_fresh")


class Operations(TorchDispatchMode):
    """Counts the operations that compute or copy numbers."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not func.is_view and not any(part in name for part in _NO_KERNEL):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


def operations(work):
    with Operations() as seen:
        work()
    return seen.counts.total()


@pytest.mark.parametrize(
    ("name", "usual", "clipping", "most", "sizes", "dtype"),
    [
        ("WRN-16-4", 107, "flat", 420, (64, 512), torch.float32),
        ("WRN-16-4", 107, "flat", 460, (64, 512), torch.bfloat16),
        ("WRN-16-4", 107, "per_layer", 520, (64,), torch.float32),
        ("ViT-S/16", 558, "flat", 900, (64,), torch.float32),
        ("ViT-S/16", 558, "per_layer", 1500, (64,), torch.float32),
    ],
)
def test_a_private_step_has_few_operations_whatever_the_batch(monkeypatch, name, usual, clipping, most, sizes, dtype):
    """Forward and backward pass and the clipped sum, with the methods of a device that is no CPU."""
    # The meta device has no autocast.
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    make, shape = MODELS[name]
    with torch.device("meta"):
        model, x, y = make().to(dtype), torch.empty(512, *shape, dtype=dtype), torch.zeros(512, dtype=torch.long)
    parameters = dict(model.named_parameters())
    total = ClippedSum(parameters, getattr(ClipPlan, clipping)(max_grad_norm=1.0))

    def private(size):
        total.begin(size)
        recording = Recording(parameters, size, total.take)
        losses = recording.run(lambda x, y: F.cross_entropy(model(x[None]), y[None]), x[:size], y[:size])
        recording.backward(losses)
        total.end()

    private(64)  # the first physical batch also looks up the places of small gradients
    found = {operations(lambda size=size: private(size)) for size in sizes}
    assert len(found) == 1
    assert most / 2 < max(found) <= most
    ordinary = operations(lambda: F.cross_entropy(model(x[:64]), y[:64]).backward())
    assert ordinary == pytest.approx(usual, rel=0.05)


# How often it waits


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def vit():
    size = {"img_size": 32, "patch_size": 8, "depth": 1, "global_pool": "map", "class_token": False}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **size)


def windows():
    size = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}
    return timm.create_model("swinv2_tiny_window8_256", num_classes=10, **size)


WHOLE = {"max_physical_batch_size": SIZE}  # one physical batch, and three where nothing else is said
STEPS = {
    "WRN, per layer": (lambda: WideResNet(10, 1, 10), (3, 32, 32), WHOLE | {"clip_plan": ClipPlan.per_layer()}),
    "ViT, pooled by attention": (vit, (3, 32, 32), WHOLE),
    "Swin v2, positions by a network": (windows, (3, 32, 32), WHOLE),
    "one by one": (small, (3, 8, 8), {"examples": "one_by_one"}),
    "augmult": (small, (3, 8, 8), {"reading": Reading(augmult=2), "max_physical_batch_size": 4}),
    "DiSK": (small, (3, 8, 8), {"disk": DiSK(gain=0.5)}),
    "rank 0 of 2": (small, (3, 8, 8), {"ranks": Ranks(rank=0, size=2), "max_physical_batch_size": 1}),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_physical_batch_waits_and_a_release_only_for_other_ranks(gpu, name):
    make, shape, settings = STEPS[name]
    with torch.device("meta"):
        model = make()
    step = private_step(model, shape, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with OneDevice() as device:
        for _ in range(2):
            for batch in step.batches():
                step.accumulate(batch)
            step.release()
            optimizer.step()
    assert len(device.reads) == (2 if "ranks" in settings else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, (_, _, settings) in STEPS.items() if "ranks" not in settings])
def test_a_gpu_is_not_waited_for(name):
    make, shape, settings = STEPS[name]
    model = make().cuda()
    step = private_step(model, shape, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def waits(work):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]

    for number in range(3):
        batches = list(step.batches())
        found = [waits(lambda batch=batch: step.accumulate(batch)) for batch in batches]
        found.append(waits(step.release))
        optimizer.step()
        if number > 0:  # the first step makes what all later ones use
            assert found == [[]] * (len(batches) + 1)
