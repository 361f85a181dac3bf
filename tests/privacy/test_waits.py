"""How often a private step waits for the device. On tensors without memory, every number that is read shows."""

import warnings

import pytest
import timm
import torch
from devices import OneDevice
from small_steps import private_step
from torch import nn

from dp_lightning.errors import DpLightningError
from dp_lightning.models import WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.reading import Reading
from dp_lightning.ranks import Ranks


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def vit(name="vit_tiny_patch16_224", **settings):
    return timm.create_model(name, num_classes=10, img_size=32, patch_size=8, depth=2, **settings)


def windows(name):
    size = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4)}
    return timm.create_model(name, num_classes=10, **size)


STEPS = {
    "WRN-16-4, per layer": (lambda: WideResNet(16, 4, 10), (3, 32, 32), {"clip_plan": ClipPlan.per_layer()}),
    "ViT, pooled by attention": (lambda: vit(global_pool="map", class_token=False), (3, 32, 32), {}),
    "EVA, rotary positions": (lambda: vit("eva02_tiny_patch14_224"), (3, 32, 32), {}),
    "CaiT, class attention": (lambda: vit("cait_xxs24_224"), (3, 32, 32), {}),
    "Swin": (lambda: windows("swin_tiny_patch4_window7_224"), (3, 32, 32), {}),
    "Swin v2, positions by a network": (lambda: windows("swinv2_tiny_window8_256"), (3, 32, 32), {}),
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
            batches = list(step.batches())
            assert len(batches) == 3
            for batch in batches:
                step.accumulate(batch)
            if "ranks" in settings:
                with pytest.raises(DpLightningError, match="0 of 2 ranks added noise"):  # zeros are read
                    step.release()
                assert len(device.reads) == 1
                return
            step.release()
            optimizer.step()
    assert device.reads == []


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
            assert found == [[]] * 4
