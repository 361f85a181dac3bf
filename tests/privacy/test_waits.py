"""How often a private step waits for the device: on tensors without memory, every number that is read is an error."""

import contextlib

import pytest
import timm
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.models import WideResNet
from dp_lightning.privacy import PrivacyPlan, PrivateStep, lineage
from dp_lightning.privacy.isolation import contents, later

SIZE = 6
NETWORKS = {
    "WRN-16-4": (lambda: WideResNet(16, 4, 10), (3, 32, 32)),
    "ViT": (
        lambda: timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, depth=2),
        (3, 32, 32),
    ),
}


@pytest.fixture
def reads(monkeypatch):
    """The reads of the device that were made on purpose: how many tensors each."""
    made = []

    def on_cpu(tensors):
        made.append(len(tensors))
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    monkeypatch.setattr(later, "on_cpu", on_cpu)
    monkeypatch.setattr(contents, "_has_memory", lambda tensor: True)
    monkeypatch.setattr(lineage, "_is_readable", lambda tensor: tensor.layout is torch.strided)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    return made


def steps_on_a_device(make, shape, *, examples="together", clip_plan=None):
    """Two logical steps of three physical batches each."""
    with torch.device("meta"):
        model = make()
    data = TensorDataset(torch.zeros(SIZE, *shape), torch.zeros(SIZE, dtype=torch.long))
    plan = PrivacyPlan(num_train=SIZE, expected_batch_size=SIZE, num_steps=2, noise_multiplier=1.0, delta=1e-5)
    step = PrivateStep(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        data,
        plan=plan,
        clip_plan=clip_plan,
        examples=examples,
        max_physical_batch_size=2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step, optimizer


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_waits_once_and_no_physical_batch_does(reads, name):
    step, optimizer = steps_on_a_device(*NETWORKS[name])
    step.start()
    reads.clear()
    for number in range(2):
        batches = list(step.batches())
        assert len(batches) == 3
        for batch in batches:
            step.accumulate(batch)
            assert len(reads) == number
        step.release()
        assert len(reads) == number + 1
        optimizer.step()
        step.stepped()
        assert len(reads) == number + 1
