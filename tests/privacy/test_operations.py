"""How many operations a private step has: each starts a kernel on a GPU, where small models wait for them."""

import contextlib
from collections import Counter

import pytest
import timm
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dp_lightning.models import WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording

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


@pytest.fixture(autouse=True)
def _meta_has_no_autocast(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


def private(name, size, plan):
    """Forward and backward pass and the clipped sum, with the methods of a device that is no CPU."""
    make, shape = MODELS[name]
    with torch.device("meta"):
        model, x, y = make(), torch.empty(size, *shape), torch.zeros(size, dtype=torch.long)
    parameters = dict(model.named_parameters())
    total = ClippedSum(parameters, plan)
    for _ in range(2):  # the first physical batch also looks up the places of small gradients
        with Operations() as seen:
            total.begin(size)
            recording = Recording(parameters, size, total.take)
            recording.backward(recording.run(lambda x, y: F.cross_entropy(model(x[None]), y[None]), x, y))
            total.end()
    return seen.counts.total()


@pytest.mark.parametrize(
    ("name", "clipping", "most"),
    [
        ("WRN-16-4", "flat", 420),
        ("WRN-16-4", "per_layer", 520),
        ("ViT-S/16", "flat", 900),
        ("ViT-S/16", "per_layer", 1500),
    ],
)
def test_a_private_step_has_few_operations_whatever_the_batch(name, clipping, most):
    plan = getattr(ClipPlan, clipping)(max_grad_norm=1.0)
    few = private(name, 64, plan)
    assert most / 2 < few <= most
    assert private(name, 512, plan) == few
