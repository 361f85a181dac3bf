"""How often a private step waits for the device, and that what is read late is still found in time.

On tensors without memory, every number that is read is an error.
"""

import warnings

import pytest
import timm
import torch
from devices import OneDevice
from small_steps import private_step
from torch import nn

from dp_lightning.errors import ModelError
from dp_lightning.models import WideResNet
from dp_lightning.privacy import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.isolation import later
from dp_lightning.privacy.record import RunRecord
from dp_lightning.ranks import Ranks


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10))


def vit(name="vit_tiny_patch16_224", **settings):
    return timm.create_model(name, num_classes=10, img_size=32, patch_size=8, depth=2, **settings)


def windows(name):
    size = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4)}
    return timm.create_model(name, num_classes=10, **size)


STEPS = {
    "WRN-16-4": (lambda: WideResNet(16, 4, 10), (3, 32, 32), {}),
    "WRN-16-4, per layer": (lambda: WideResNet(16, 4, 10), (3, 32, 32), {"clip_plan": ClipPlan.per_layer()}),
    "ViT": (vit, (3, 32, 32), {}),
    "ViT, pooled by attention": (lambda: vit(global_pool="map", class_token=False), (3, 32, 32), {}),
    "EVA, rotary positions": (lambda: vit("eva02_tiny_patch14_224"), (3, 32, 32), {}),
    "CaiT, class attention": (lambda: vit("cait_xxs24_224"), (3, 32, 32), {}),
    "Swin": (lambda: windows("swin_tiny_patch4_window7_224"), (3, 32, 32), {}),
    "Swin v2, positions by a network": (lambda: windows("swinv2_tiny_window8_256"), (3, 32, 32), {}),
    "one by one": (small, (3, 8, 8), {"examples": "one_by_one"}),
    "augmult": (small, (3, 8, 8), {"augmult": 2, "max_physical_batch_size": 4}),
    "DiSK": (small, (3, 8, 8), {"disk": DiSK(gain=0.5)}),
    "rank 0 of 2": (small, (3, 8, 8), {"ranks": Ranks(rank=0, size=2), "max_physical_batch_size": 1}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_once_and_no_physical_batch_does(reads, name):
    make, shape, settings = STEPS[name]
    with torch.device("meta"):
        model = make()
    step = private_step(model, shape, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step.start()
    reads.clear()
    with OneDevice() as device:
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
    assert device.reads == []  # but for those on purpose


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, (_, _, settings) in STEPS.items() if "ranks" not in settings])
def test_a_gpu_is_waited_for_once(name):
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
        of_batches = [waits(lambda batch=batch: step.accumulate(batch)) for batch in batches]
        of_release = waits(step.release)
        optimizer.step()
        of_step = waits(step.stepped)
        if number > 0:  # the first step makes what all later ones use
            assert of_batches == [[]] * 3
            assert len(of_release) <= 1
            assert of_step == []


class WithTeacher(nn.Module):
    """Its loss writes to a frozen weight behind autograd's back, where ``leaks`` is set."""

    def __init__(self, leaks):
        super().__init__()
        self.student, self.teacher, self.leaks = nn.Linear(12, 10), nn.Linear(12, 10).requires_grad_(False), leaks

    def forward(self, x):
        if self.leaks:
            self.teacher.weight.data.view(torch.uint8).numpy()[0, 0] ^= 1
        return self.student(x.flatten(1)) + self.teacher(x.flatten(1))


def take(step):
    for batch in step.batches():
        step.accumulate(batch)


def leaking_step():
    model = WithTeacher(leaks=True)
    return private_step(model, (3, 2, 2), examples="one_by_one"), model


LEAK = r"training_step changes self\.teacher\.weight"
FAULT = "a step ended by an error (ModelError)"


def test_what_a_loss_keeps_in_a_tensor_is_found_before_the_release(late):
    step, model = leaking_step()
    take(step)  # on a CPU this raises
    with pytest.raises(ModelError, match=LEAK):
        step.release()
    assert step.record.ledger.num_steps == 1  # counted before anything is released
    assert all(parameter.grad is None for parameter in model.parameters())
    assert FAULT in step.all_faults


@pytest.mark.parametrize("first", ["release", "statement", "require_untouched"])
def test_what_was_found_once_refuses_every_later_release(late, first):
    """The next step starts from what this one has left behind."""
    step, model = leaking_step()
    take(step)
    if first == "statement":
        assert FAULT in step.statement().faults
    else:
        refuse = step.release if first == "release" else step.isolation.require_untouched
        with pytest.raises(ModelError, match=LEAK):
            refuse()
    if first == "release":
        take(step)
    with pytest.raises(ModelError, match=LEAK):
        step.release()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert FAULT in step.statement().faults


def test_an_interruption_of_the_reading_loses_nothing(late, monkeypatch):
    step, _ = leaking_step()
    take(step)
    on_cpu = later.on_cpu

    def interrupted(tensors):
        raise KeyboardInterrupt

    monkeypatch.setattr(later, "on_cpu", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.release()
    monkeypatch.setattr(later, "on_cpu", on_cpu)
    assert step.later.error is None
    step.later.look()
    assert str(step.later.error).startswith("training_step changes self.teacher.weight")
    take(step)
    with pytest.raises(ModelError, match=LEAK):
        step.release()
    assert FAULT in step.statement().faults


def test_what_one_process_finds_no_other_releases(late, monkeypatch):
    """The sum over ranks says how many have found something; each rank reads it before it releases."""
    monkeypatch.setattr(
        Ranks, "add_up", lambda self, tensor: tensor.add_(torch.tensor([0.0] * (len(tensor) - 1) + [1]))
    )
    model = WithTeacher(leaks=False)
    step = private_step(model, (3, 2, 2), ranks=Ranks(rank=0, size=2), max_physical_batch_size=1)
    take(step)
    with pytest.raises(ModelError, match="1 of 2 processes found"):
        step.release()
    assert all(parameter.grad is None for parameter in model.parameters())

    sent = []
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensor: sent.append(tensor[-3:].tolist()))
    leaking = WithTeacher(leaks=True)
    ranks = Ranks(rank=1, size=2)
    step = private_step(leaking, (3, 2, 2), examples="one_by_one", ranks=ranks, max_physical_batch_size=1)
    take(step)
    with pytest.raises(ModelError, match=LEAK):
        step.release()
    assert sent == [[0.0, 0.0, 1.0]]


def test_a_step_is_in_the_journal_before_its_sum_leaves_the_process(monkeypatch):
    order = []
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensor: order.append("collective"))

    class Journal:
        run, heads = "run", ()

        def record(self, **step):
            order.append("journal")

    step = private_step(
        WithTeacher(leaks=False),
        (3, 2, 2),
        record=RunRecord(journal=Journal()),
        ranks=Ranks(rank=0, size=2),
        max_physical_batch_size=1,
    )
    take(step)
    step.release()
    assert order == ["journal", "collective"]


@pytest.mark.parametrize("when", ["between steps", "between physical batches", "after the last step"])
def test_weights_that_other_code_changes_are_found(late, when):
    model = WithTeacher(leaks=False)
    step = private_step(model, (3, 2, 2))
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    take(step)
    step.release()
    optimizer.step()
    step.stepped()
    first, *others = step.batches()
    if when == "between steps":
        model.student.weight.data[0, 0] += 1
    if when != "after the last step":
        step.accumulate(first)
        if when == "between physical batches":
            model.student.weight.data[0, 0] += 1
        for batch in others:
            step.accumulate(batch)
        with pytest.raises(ModelError, match=r"student\.weight changed"):
            step.release()
        assert step.record.ledger.num_steps == 2
    else:
        model.student.weight.data[0, 0] += 1
    assert any("student.weight" in fault or "ended by an error" in fault for fault in step.statement().faults)


def test_all_that_waits_is_told_before_an_error_is_raised(late):
    queue, told = later.Later(), []

    def refuse(numbers):
        told.append(numbers.tolist())
        raise ModelError(f"found {numbers.tolist()}")

    queue.read(torch.tensor([True, False]), refuse)
    queue.read(torch.tensor([[1.5], [2.5]]), lambda numbers: told.append(numbers.tolist()))
    queue.read(torch.tensor(7, dtype=torch.int16), refuse)
    assert told == []
    with pytest.raises(ModelError, match=r"found \[True, False\]"):
        queue.settle()
    assert told == [[True, False], [[1.5], [2.5]], 7]
    with pytest.raises(ModelError, match=r"found \[True, False\]"):  # it stays
        queue.settle()
    assert len(told) == 3  # nothing is told twice
