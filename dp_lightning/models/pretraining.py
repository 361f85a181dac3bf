"""Trains a network without labels on images from random processes, so its weights come from no data at all.

Two views of an image lie together, and images spread over the sphere (Wang and Isola 2020, "Understanding contrastive
representation learning through alignment and uniformity on the hypersphere"), as Baradad et al. 2021 use it.

Images, views, weights at the start and the order of all of these follow from a public seed: whoever has the recipe can
make the weights again, up to the rounding of another processor.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_lightning.errors import ModelError
from dp_lightning.models.pretrained import last_layer
from dp_lightning.models.random_images import PROCESSES
from dp_lightning.models.whitening import Whitening

_EMBEDDING = 128
_WEIGHT_DECAY = 0.01
_WARM_UP = 0.05  # fraction of the steps
_PRECISIONS = {"32": torch.float32, "bf16": torch.bfloat16}
_BLOCK = 500  # number of images that are drawn from one generator
_WHITENED = 6000  # number of images by which features are whitened
# The smallest area of a view, as a part of the largest, and how far brightness, contrast and each colour change.
_SMALLEST_AREA = 0.2
_BRIGHTNESS, _CONTRAST, _COLOUR = 0.4, 0.4, 0.2


@dataclass(frozen=True)
class Recipe:
    """All settings that the weights follow from.

    Attributes:
        network: The model of the configuration, with its settings.
        channels: Number of channels of an image.
        size: Height and width of an image in pixels.
        mean, std: Mean and standard deviation by which images are normalised, as those of the data will be.
        processes: Names of ``PROCESSES``, which take turns.
        images: Number of images; each is seen again and again, never in the same view.
        steps: Number of steps of the optimizer.
        batch_size: Number of images of a step.
        learning_rate: Learning rate of AdamW, after a warm-up and before a cosine schedule.
        view_size: Height and width of a view in pixels; None is that of the images. Small views take less time, and
            suit a network that averages over places, as residual networks do.
        precision: Precision of the network's operations, "32" or "bf16" (bfloat16 where torch deems it safe).
        seed: Seed of everything random.
    """

    network: dict[str, Any]
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    processes: tuple[str, ...] = tuple(PROCESSES)
    images: int = 50_000
    steps: int = 10_000
    batch_size: int = 256
    learning_rate: float = 0.002
    view_size: int | None = None
    precision: str = "32"
    seed: int = 0

    def to_json(self) -> str:
        """Return the text that stands in the file of the weights."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def random_images(recipe: Recipe, made: Callable[[int], None] = lambda count: None) -> Tensor:
    """Return the images of a recipe (images, C, H, W), in 8 bits.

    Args:
        made: A function that is called with the number of images that are made.
    """
    found = torch.empty(recipe.images, recipe.channels, recipe.size, recipe.size, dtype=torch.uint8)
    for block, start in enumerate(range(0, recipe.images, _BLOCK)):
        name = recipe.processes[block % len(recipe.processes)]
        count = min(_BLOCK, recipe.images - start)
        generator = torch.Generator().manual_seed(_mixed(recipe.seed, "images", block))
        images = PROCESSES[name](count, channels=recipe.channels, size=recipe.size, generator=generator)
        found[start : start + count] = (images * 255).round().to(torch.uint8)
        made(start + count)
    return found


def view(images: Tensor, generator: torch.Generator, size: int | None = None) -> Tensor:
    """Return a view of each image (n, C, H, W) in [0, 1]: a part of it, mirrored or not, in other colours.

    Args:
        generator: Generator of the random numbers, on the CPU.
        size: Height and width of the views; None is that of the images. A smaller view shows at most twice the area
            that it has in the image, so that things keep about their size.

    Returns:
        (n, C, size, size) in [0, 1].
    """
    shape = (*images.shape[:2], *((size, size) if size is not None else images.shape[2:]))
    largest = min(1.0, 2 * (shape[2] * shape[3]) / (images.shape[2] * images.shape[3]))

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    n = len(images)
    area = largest * (_SMALLEST_AREA + (1 - _SMALLEST_AREA) * drawn(n))
    ratio = torch.exp(0.3 * (2 * drawn(n) - 1))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    mirror = torch.where(drawn(n) < 0.5, -1.0, 1.0)
    part = torch.zeros(n, 2, 3)
    part[:, 0, 0], part[:, 1, 1] = width * mirror, height
    part[:, 0, 2], part[:, 1, 2] = (1 - width) * (2 * drawn(n) - 1), (1 - height) * (2 * drawn(n) - 1)
    grid = F.affine_grid(part.to(images.device), list(shape), align_corners=False)
    seen = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    contrast = 1 + _CONTRAST * (2 * drawn(n, 1, 1, 1) - 1)
    shift = _BRIGHTNESS * (2 * drawn(n, 1, 1, 1) - 1) + _COLOUR * (2 * drawn(n, images.shape[1], 1, 1) - 1)
    mean = seen.mean(dim=(1, 2, 3), keepdim=True)
    return ((seen - mean) * contrast.to(seen.device) + mean + shift.to(seen.device)).clamp(0, 1)


def alignment(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean squared distance of the two views (n, d) of each image, both of length 1."""
    return (first - second).square().sum(dim=1).mean()


def uniformity(points: Tensor) -> Tensor:
    """Return log E exp(-2 |x - y|^2) over pairs of different points (n, d) of length 1; lower is more even."""
    n = len(points)
    return torch.pdist(points).square().mul(-2).logsumexp(dim=0) - torch.log(torch.tensor(n * (n - 1) / 2))


class Pretraining:
    """The training of one network by a recipe.

    Args:
        network: Maps images (n, C, H, W) to logits by its last linear layer, which is left as it is.
        images: The images of ``random_images``.
        device: The device that the network is trained on.

    Raises:
        ModelError: The network has no linear layer at its end, or takes no views of this size.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, images: Tensor, device: torch.device) -> None:
        self.network, self.recipe, self._images, self._device = network.to(device), recipe, images, device
        self.steps = 0
        self._last = last_layer(network)
        self._last_layer = network.get_submodule(self._last)
        width = self._last_layer.in_features
        assert isinstance(width, int)
        generator = torch.Generator().manual_seed(_mixed(recipe.seed, "head", 0))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _EMBEDDING))
        with torch.no_grad():
            for parameter in self.head.parameters():
                spread = width**-0.5
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * spread)
        self.head.to(device)
        last = set(self._last_layer.parameters())
        before = [parameter for parameter in network.parameters() if parameter not in last]
        self._optimizer = torch.optim.AdamW(
            [*before, *self.head.parameters()], lr=recipe.learning_rate, weight_decay=_WEIGHT_DECAY
        )
        self._mean, self._std = (
            torch.tensor(values, device=device).view(-1, 1, 1) for values in (recipe.mean, recipe.std)
        )
        size = recipe.view_size or recipe.size
        try:
            with torch.no_grad():
                self._inputs(self._last_layer, torch.zeros(1, recipe.channels, size, size, device=device))
        except RuntimeError as error:
            raise ModelError(
                f"The network takes no views of {size} pixels ({error}). Leave --view-size out."
            ) from error

    def step(self) -> Tensor:
        """Take one step and return the loss before it, on the device.

        The random numbers of a step follow from its number, so a training that resumes gives the same weights.
        """
        recipe, generator = self.recipe, torch.Generator().manual_seed(_mixed(self.recipe.seed, "step", self.steps))
        rows = torch.randint(len(self._images), (recipe.batch_size,), generator=generator)
        images = self._images[rows].to(self._device).float() / 255
        warm = min(1.0, (self.steps + 1) / max(1.0, _WARM_UP * recipe.steps))
        cosine = (1 + math.cos(math.pi * self.steps / recipe.steps)) / 2
        self._optimizer.param_groups[0]["lr"] = recipe.learning_rate * warm * cosine
        views = torch.cat([view(images, generator, recipe.view_size) for _ in range(2)])
        dtype = _PRECISIONS[recipe.precision]
        with torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32):
            features = self._inputs(self._last_layer, views)
        points = F.normalize(self.head(features.float()), dim=1)
        first, second = points.chunk(2)
        loss = alignment(first, second) + (uniformity(first) + uniformity(second)) / 2
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step needs."""
        return {
            "recipe": self.recipe.to_json(),
            "steps": self.steps,
            "network": self.network.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.network.load_state_dict(state["network"])
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Fit a `Whitening`, and return the weights of the network without its last layer, on the CPU."""
        for part in self.network.modules():
            if isinstance(part, Whitening):
                blocks = self._images[:_WHITENED].split(250)
                part.fit(torch.cat([self._inputs(part, block.to(self._device).float() / 255) for block in blocks]))
        state = self.network.state_dict()
        return {
            name: value.cpu().contiguous() for name, value in state.items() if not name.startswith(f"{self._last}.")
        }

    def _inputs(self, layer: nn.Module, images: Tensor) -> Tensor:
        """Return the inputs of a layer for images (n, C, H, W) in [0, 1]."""
        found: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            self.network((images - self._mean) / self._std)
        finally:
            hook.remove()
        return found[0].flatten(1)


def _mixed(seed: int, purpose: str, number: int) -> int:
    """Return a seed for each number of a purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()[:7], "big")
