"""The ways to take a training step that ``step.py`` compares: from a model to a function that takes one step.

A step is the forward pass, the backward pass and, if the way is private, the clipped sum of the per-example gradients.
Noise and the optimizer's step cost the same in every way and are left out; ``runs.py`` has whole runs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import timm
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock

from dp_lightning.models import ResNet, SmallCNN, WideResNet
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.contribution import PerExample
from dp_lightning.privacy.gradients.recording import Recording

Step = Callable[[Tensor, Tensor], None]


def mnist_small() -> nn.Module:
    """The network of Opacus' MNIST example: 26 thousand parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def mnist_large() -> nn.Module:
    """The network of PyTorch's MNIST example, without dropout: 1.2 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


DEFAULT_MODELS = ("wrn16-4", "wrn28-10", "resnet18", "vit-s16")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]] = {
    # builder, shape of an example, physical batch size by device
    "wrn16-4": (lambda: WideResNet(16, 4, 10), (3, 32, 32), {"cpu": 64, "cuda": 512}),
    "wrn28-10": (lambda: WideResNet(28, 10, 10), (3, 32, 32), {"cpu": 16, "cuda": 512}),
    "resnet18": (lambda: ResNet(18, 10, stem="cifar"), (3, 32, 32), {"cpu": 64, "cuda": 512}),
    "small-cnn": (lambda: SmallCNN(10, in_channels=1), (1, 8, 8), {"cpu": 64, "cuda": 512}),
    "mnist-small": (mnist_small, (1, 28, 28), {"cpu": 64, "cuda": 512}),
    "mnist-large": (mnist_large, (1, 28, 28), {"cpu": 64, "cuda": 512}),
    "features": (lambda: nn.Linear(768, 10), (768,), {"cpu": 8192, "cuda": 8192}),
    # It costs little beside the reading of its images.
    "pooled": (
        lambda: nn.Sequential(nn.MaxPool2d(1, 32), nn.Flatten(), nn.Linear(147, 10)),
        (3, 224, 224),
        {"cpu": 64, "cuda": 64},
    ),
    "vit-s16": (
        lambda: timm.create_model("vit_small_patch16_224", num_classes=1000),
        (3, 224, 224),
        {"cpu": 8, "cuda": 128},
    ),
}


def build(
    name: str,
    device: torch.device,
    count: int | None = None,
    memory_format: torch.memory_format = torch.channels_last,
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with random images and labels; ``count`` is the model's own physical batch size by default."""
    make, shape, sizes = MODELS[name]
    model = make().to(device).to(memory_format=memory_format).train()
    count = count or sizes[device.type]
    images = torch.randn(count, *shape, device=device).to(memory_format=memory_format)
    return model, images, torch.randint(10, (count,), device=device)


def ordinary(model: nn.Module, autocast: Callable[[], Any]) -> Step:
    """The step without privacy."""

    def step(images: Tensor, labels: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        with autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()

    return step


def ours(plan: ClipPlan, augmult: int = 1) -> Callable[[nn.Module, Callable[[], Any]], Step]:
    """This project's recording under vmap; with ``augmult``, the images are that many views of each example."""

    def make(model: nn.Module, autocast: Callable[[], Any]) -> Step:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        total = ClippedSum(trained, plan)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(images), labels)

        def step(images: Tensor, labels: Tensor) -> None:
            total.reset()
            examples = len(images) // augmult
            total.begin(examples)
            recording = Recording(trained, examples, total.take)
            with autocast():
                losses = recording.run(loss, *(rows.unflatten(0, (examples, augmult)) for rows in (images, labels)))
            recording.backward(losses)
            total.end()

        return step

    return make


def one_by_one(model: nn.Module, autocast: Callable[[], Any]) -> Step:
    """This project's clipped sum of gradients by ordinary autograd, one example after the other."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = ClippedSum(trained, ClipPlan.flat())

    def step(images: Tensor, labels: Tensor) -> None:
        total.reset()
        for image, label in zip(images.split(1), labels.split(1), strict=True):
            with autocast():
                loss = F.cross_entropy(model(image), label)
            gradients = torch.autograd.grad(loss, list(trained.values()))
            total.begin(1)
            total.take(PerExample({name: g[None] for name, g in zip(trained, gradients, strict=True)}))
            total.end()

    return step


def prepared_for_opacus(model: nn.Module) -> nn.Module:
    """Opacus' backward hooks forbid the in-place addition in torchvision's residual blocks."""
    for block in model.modules():
        if isinstance(block, BasicBlock):
            block.forward = MethodType(_add_out_of_place, block)  # type: ignore[method-assign]
    return model


def _add_out_of_place(block: BasicBlock, x: Tensor) -> Tensor:
    identity = x if block.downsample is None else block.downsample(x)
    inner = block.relu(block.bn1(block.conv1(x)))
    return block.relu(block.bn2(block.conv2(inner)) + identity)


def made_private(
    engine: PrivacyEngine, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], mode: str
) -> tuple[Any, Any, Any, DataLoader[Any]]:
    """Model, optimizer, loss and loader of Opacus; the mode is ``hooks``, ``functorch`` or ``ghost``."""
    model, optimizer, *criterion, loader = engine.make_private(
        module=prepared_for_opacus(model),
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    return model, optimizer, criterion[0] if criterion else nn.CrossEntropyLoss(), loader


def opacus(mode: str) -> Callable[[nn.Module, Callable[[], Any]], Step]:
    """The step of Opacus; ghost clipping has two backward passes, and the other modes have per-example gradients."""

    def make(model: nn.Module, autocast: Callable[[], Any]) -> Step:
        loader: Any = DataLoader(TensorDataset(torch.zeros(1)))  # from which nothing is read
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        private, optimizer, criterion, _ = made_private(PrivacyEngine(), model, sgd, loader, mode)
        add = optimizer.accumulate if mode == "ghost" else optimizer.clip_and_accumulate

        def step(images: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = criterion(private(images), labels)
            loss.backward()
            add()

        return step

    return make


WAYS: dict[str, Callable[[nn.Module, Callable[[], Any]], Step]] = {
    "ordinary": ordinary,
    "ours flat": ours(ClipPlan.flat()),
    "ours per-layer": ours(ClipPlan.per_layer()),
    "ours, one by one": one_by_one,
    "ours, augmult 4": ours(ClipPlan.flat(), augmult=4),
    "ours, augmult 16": ours(ClipPlan.flat(), augmult=16),
    "Opacus hooks": opacus("hooks"),
    "Opacus functorch": opacus("functorch"),
    "Opacus ghost": opacus("ghost"),
}


def autocast_to(device: str, dtype: str) -> Callable[[], Any]:
    """The context of the forward pass."""
    if dtype != "bf16":
        return nullcontext
    return lambda: torch.autocast(device, torch.bfloat16)
