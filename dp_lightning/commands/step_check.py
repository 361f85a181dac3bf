"""One private step without noise on a tiny network, beside a loop over its examples in float64."""

import contextlib
import io
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.commands.doctor import Finding
from dp_lightning.privacy import ClipPlan, PrivateStep, RunShape

_EXAMPLES, _CLASSES, _SIZE = 8, 3, 6
# The norms of the gradients lie from 3.4 to 6.9, so some are clipped and some are not.
_BOUND = 4.5
# Float32 rounds to 6e-8; sums of some hundred products of one size lose two digits more at most.
_FLOAT32 = 1e-4
# The convolutions of a GPU may round their factors to TF32, 11 bits: 5e-4 for each product.
_TF32 = 1e-2


def private_step() -> Iterator[Finding]:
    """The step on the CPU, and on the GPU if there is one."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        tolerance = _FLOAT32 if device == "cpu" else _TF32
        error = difference(torch.device(device))
        found = f"on {device}, off by {error:.1e} of a loop over {_EXAMPLES} examples in float64"
        if not error <= tolerance:  # also if it is not a number
            fix = "do not train with these versions; install those of constraints.txt and report it"
            yield Finding("problem", "private step", f"{found}; at most {tolerance:g} is rounding", fix)
        else:
            yield Finding("ok", "private step", f"{found} (rounding: at most {tolerance:g})")


def difference(device: torch.device) -> float:
    """The largest difference between the step and the loop, over the largest entry of the loop's gradient."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_EXAMPLES, 1, _SIZE, _SIZE, generator=generator)
    images *= torch.linspace(0.1, 3.0, _EXAMPLES).reshape(-1, 1, 1, 1)  # gradients of different norms
    labels = torch.arange(_EXAMPLES) % _CLASSES
    model = _network(generator)
    expected = _loop(model, images, labels)
    model = model.float().to(device)
    dataset = TensorDataset(images, labels)
    plan = RunShape(num_train=_EXAMPLES, expected_batch_size=_EXAMPLES, num_steps=1, delta=1e-2).with_noise(0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        step = PrivateStep(
            model,
            lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
            dataset,
            plan=plan,
            clip_plan=ClipPlan.flat(max_grad_norm=_BOUND),
            max_physical_batch_size=3,  # several physical batches, the last one smaller
        )
        for batch in step.batches():
            step.accumulate(batch)
        step.release()
    got = torch.cat([p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None])
    return float((got - expected).abs().max() / expected.abs().max())


def _network(generator: torch.Generator) -> nn.Sequential:
    """A convolution, a norm and a linear layer, in float64."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (_SIZE - 2) ** 2, _CLASSES)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) / max(parameter[0].numel(), 4) ** 0.5
            parameter.copy_(drawn)
    return model


def _loop(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The mean of the clipped gradients, one example after the other."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for image, label in zip(images.double(), labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        total += gradient * min(1.0, _BOUND / float(gradient.norm()))
    return total / len(images)
