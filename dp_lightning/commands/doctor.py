"""`dpl doctor`: the versions and devices of this machine, and one private step compared with a loop over its examples.

Every line is ok, or a problem with what to do. The step is one of a tiny network without noise, and the loop
computes in float64.
"""

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from dp_lightning import __version__

if TYPE_CHECKING:
    import torch

_GIB = 2**30
_EXAMPLES, _CLASSES, _SIZE = 8, 3, 6
# The norms of the gradients lie from 3.7 to 5.8, so some are clipped and some are not.
_BOUND = 5.0
# Float32 rounds to 6e-8, and sums of some hundred products of one size lose two digits more at most. The convolutions
# of a GPU may round their factors to TF32, 11 bits: 5e-4 for each product.
_ROUNDING = {"cpu": 1e-4, "cuda": 1e-2}

Line = tuple[str, str, str]
""""ok" or "problem"; what was looked at; what was found, and what to do."""


def main(arguments: list[str]) -> None:
    """Print the report; exits with 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        prog="dpl doctor", description=__doc__, epilog="Exits with 1 if there is a problem.", allow_abbrev=False
    )
    parser.parse_args(arguments[1:])
    healthy = True
    for check in (packages, devices, private_step):
        try:
            for level, subject, found in check():
                print(f"{level:<8} {subject:<13} {found}", flush=True)
                healthy &= level != "problem"
        except Exception as error:
            print(f"problem  {check.__name__:<13} the check ended by {type(error).__name__}: {error}", flush=True)
            healthy = False
    sys.exit(0 if healthy else 1)


def packages() -> Iterator[Line]:
    """Python, and every package that dp-lightning always needs."""
    yield "ok", "Python", f"{platform.python_version()} on {platform.system()}, dp-lightning {__version__}"
    for requirement in map(Requirement, requires("dp-lightning") or []):
        if requirement.marker is not None:  # of an extra
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "not installed"
        if found != "not installed" and requirement.specifier.contains(found, prereleases=True):
            yield "ok", requirement.name, f"{found} ({requirement.specifier})"
        else:
            yield "problem", requirement.name, f"{found}; install it by pip install '{requirement}'"


def devices() -> Iterator[Line]:
    """The cores that are left to this process, and each GPU that torch can use."""
    from dp_lightning.cores import available_cores, respect_quota

    respect_quota()
    import torch

    yield "ok", "CPU", f"{available_cores()} cores, torch uses {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield "ok", "GPU", f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "ok", "GPU", f"none that torch can use (CUDA {torch.version.cuda}); if there is one, compare nvidia-smi"


def private_step() -> Iterator[Line]:
    """One private step on the CPU, and one on the GPU if there is one, beside the loop."""
    import torch

    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        error, most = difference(torch.device(device)), _ROUNDING[device]
        found = f"on {device}, off by {error:.1e} of a loop over {_EXAMPLES} examples in float64"
        if error <= most:
            yield "ok", "private step", f"{found} (rounding: at most {most:g})"
        else:  # also if the difference is not a number
            fix = "do not train with these versions; install those of constraints.txt and report it"
            yield "problem", "private step", f"{found}; at most {most:g} is rounding: {fix}"


def difference(device: "torch.device") -> float:
    """The largest difference between the step and the loop, over the largest entry of the loop's gradient."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    from dp_lightning.privacy import ClipPlan, PrivateStep, RunShape

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_EXAMPLES, 1, _SIZE, _SIZE, generator=generator)
    images *= torch.linspace(0.1, 3.0, _EXAMPLES).reshape(-1, 1, 1, 1)  # gradients of different norms
    labels = torch.arange(_EXAMPLES) % _CLASSES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = nn.Linear(4 * (_SIZE - 2) ** 2, _CLASSES)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), classifier).double()
    parameters = list(model.parameters())

    expected = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    for image, label in zip(images.double(), labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        expected += gradient * min(1.0, _BOUND / float(gradient.norm())) / _EXAMPLES

    model = model.float().to(device)
    plan = RunShape(num_train=_EXAMPLES, expected_batch_size=_EXAMPLES, num_steps=1, delta=1e-2).with_noise(0.0)
    step = PrivateStep(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        TensorDataset(images, labels),
        plan=plan,
        clip_plan=ClipPlan.flat(max_grad_norm=_BOUND),
        max_physical_batch_size=3,  # several physical batches, the last one smaller
    )
    for batch in step.batches():
        step.accumulate(batch)
    step.release()
    got = torch.cat([p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None])
    return float((got - expected).abs().max() / expected.abs().max())
