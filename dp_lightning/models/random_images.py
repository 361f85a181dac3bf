"""Images from random processes: they show nothing, and share with photographs how edges and brightness are spread.

No image was taken for them, so what is computed from them is public (Baradad et al. 2021, "Learning to see by looking
at noise"). Each function gives (n, channels, size, size) float32 in [0, 1], and the same ones for the same generator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Strength of what a channel has alone, next to what all channels share: photographs are more grey than colourful.
_COLOUR = 0.35
# Number of disks of an image of dead leaves, which cover it about four times.
_LEAVES = 200


def dead_leaves(n: int, *, channels: int, size: int, generator: torch.Generator) -> Tensor:
    """Disks that hide each other, with radii r of density r^-3, as objects at all distances have (Lee et al. 2001)."""
    places = torch.arange(size) + 0.5
    images = torch.zeros(n, channels, size, size)
    smallest, largest = size / 32, 0.7 * size
    for _ in range(_LEAVES):
        u, y, x, grey = torch.rand(4, n, 1, 1, generator=generator)
        radius = (smallest**-2 - u * (smallest**-2 - largest**-2)).rsqrt()
        inside = (places[:, None] - size * y).square() + (places - size * x).square() < radius.square()
        shades = (grey[:, None] + _COLOUR * (torch.rand(n, channels, 1, 1, generator=generator) - 0.5)).clamp(0, 1)
        images = torch.where(inside[:, None], shades, images)
    # A lens lets each pixel see a little of its neighbours.
    lens = torch.tensor([0.25, 0.5, 0.25])
    edges = F.pad(images.flatten(0, 1)[:, None], (1, 1, 1, 1), mode="reflect")
    return F.conv2d(edges, (lens[:, None] * lens)[None, None]).view_as(images)


def spectra(n: int, *, channels: int, size: int, generator: torch.Generator) -> Tensor:
    """Noise whose spectrum falls like 1 / (|f_x|^a + |f_y|^b), with a and b drawn between 0.5 and 2.5 for an image."""
    frequencies = (torch.fft.fftfreq(size) * size).abs()
    a, b = 0.5 + 2 * torch.rand(2, n, 1, 1, 1, generator=generator)
    falling = 1 / (1 + frequencies[:, None] ** a + frequencies**b)
    noise = torch.randn(n, 1 + channels, size, size, generator=generator)
    waves = torch.fft.ifft2(torch.fft.fft2(noise[:, :1] + _COLOUR * noise[:, 1:]) * falling).real
    waves = waves - waves.mean(dim=(2, 3), keepdim=True)
    waves = waves / waves.std(dim=(1, 2, 3), keepdim=True)
    brightness = 0.5 + 0.15 * torch.randn(n, 1, 1, 1, generator=generator)
    return (brightness + 0.22 * waves).clamp(0, 1)


def random_networks(n: int, *, channels: int, size: int, generator: torch.Generator) -> Tensor:
    """Images that an untrained generator makes of noise: convolutions with weights drawn anew for every 32 images.

    From 4 x 4 noise, each layer doubles the size, convolves, adds noise and applies a leaky ReLU, as in StyleGAN.
    """
    blocks = [
        _of_random_network(min(32, n - start), channels=channels, size=size, generator=generator)
        for start in range(0, n, 32)
    ]
    return torch.cat(blocks)


def _of_random_network(n: int, *, channels: int, size: int, generator: torch.Generator) -> Tensor:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width, side = 16, 4
    maps = drawn(n, width, side, side)
    while side < size:
        side *= 2
        maps = F.interpolate(maps, scale_factor=2, mode="bilinear")
        maps = F.conv2d(F.pad(maps, (1, 1, 1, 1), mode="reflect"), drawn(width, width, 3, 3) / (3 * width**0.5))
        noise = drawn(n, 1, side, side) * drawn(width, 1, 1)
        maps = F.leaky_relu(F.group_norm(maps + 0.2 * noise, 1) + 0.3 * drawn(width, 1, 1), 0.2)
    shades = drawn(1, width, 1, 1) + _COLOUR * drawn(channels, width, 1, 1)
    images = F.group_norm(F.conv2d(maps[..., :size, :size], shades), 1)
    return (0.5 + 0.22 * images).clamp(0, 1)


#: The functions by the names that recipes give them.
PROCESSES = {"dead_leaves": dead_leaves, "spectra": spectra, "random_networks": random_networks}
