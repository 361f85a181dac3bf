"""What a private step holds between two steps, as docs/large_models.md says it, counted without memory."""

import gc
import re
from pathlib import Path

import pytest
import timm
import torch
from reference import Module, record
from small_steps import private_step
from torch import nn

from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording

PAGE = (Path(__file__).parents[2] / "docs" / "large_models.md").read_text()


def bytes_of(*tensors):
    """Each memory once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("optimizer", "disk", "expected"),
    [("sgd", False, 16), ("adam", False, 20), ("sgd", True, 24)],
)
def test_bytes_of_a_trained_parameter(gpu, optimizer, disk, expected):
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 512), nn.Tanh(), nn.Linear(512, 10))
    step = private_step(model, (3, 8, 8), disk=DiSK(gain=0.5) if disk else None)
    parameters = list(model.parameters())
    made = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters),
    }[optimizer]()
    for _ in range(2):
        for batch in step.batches():
            step.accumulate(batch)
        step.release()
        made.step()
    state = [value for slots in made.state.values() for value in slots.values() if value.ndim]
    held = [step._sum.flat, *parameters, *(p.grad for p in parameters), *state, *step.state_dict().values()]
    if disk:
        held += [value for value in vars(step._extrapolation).values() if isinstance(value, torch.Tensor)]
        held += [t for value in vars(step._extrapolation).values() if isinstance(value, dict) for t in value.values()]
    count = sum(p.numel() for p in parameters)
    assert bytes_of(*held) / count == pytest.approx(expected, rel=0.01)


PARTS = {
    "pooling": lambda: nn.MaxPool2d(2),
    "attention": lambda: Module(lambda m, x: m.inner(*[x.flatten(1)] * 3)[0], inner=nn.MultiheadAttention(16, 2)),
    "recurrent": lambda: Module(lambda m, x: m.inner(x.flatten(1))[0], inner=nn.LSTM(16, 3)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_physical_batch_leaves_no_tensor_behind(name):
    """Graphs with hooks that lead back to them would never be freed: Python does not see into a graph."""
    model, counts = nn.Sequential(nn.Conv2d(3, 4, 1), PARTS[name]()), []
    for _ in range(3):
        record(model, lambda model, x: model(x).square().sum(), torch.randn(2, 3, 4, 4))
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[1] == counts[2]


def test_layers_that_are_left_out_at_random_leave_no_tensor_behind():
    layers = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
    total, counts = ClippedSum(dict(layers.named_parameters()), ClipPlan.flat()), []
    for used in ([0, 1], [0, 2], [1, 3], [2, 3]):
        recording = Recording(dict(layers.named_parameters()), 2, total.take)
        total.begin(2)
        losses = recording.run(
            lambda x, used=used: sum(layers[i](x).square().sum() for i in used), torch.randn(2, 1, 4)
        )
        recording.backward(losses)
        total.end()
        gc.collect()
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert counts[1] == counts[3]


@pytest.mark.parametrize("name", ["vit_large_patch16_224", "vit_huge_patch14_224"])
def test_the_networks_are_as_large_as_the_page_says(name):
    with torch.device("meta"):
        count = sum(p.numel() for p in timm.create_model(name).parameters())
    (billions, gigabytes) = re.search(rf"`{name}` \| ([\d.]+) \| ([\d.]+) \|", PAGE).groups()
    assert float(billions) == pytest.approx(count / 1e9, abs=0.006)
    assert float(gigabytes) == pytest.approx(16 * count / 1e9, abs=0.06)
