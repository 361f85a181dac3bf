"""Learning without labels: two views of an image lie together, and images spread over the sphere.

Wang and Isola 2020, "Understanding contrastive representation learning through alignment and uniformity on the
hypersphere", as Baradad et al. 2021 use it on images from random processes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The smallest area of a view, as a part of the largest, and how far brightness, contrast and each colour change.
_SMALLEST_AREA = 0.2
_BRIGHTNESS, _CONTRAST, _COLOUR = 0.4, 0.4, 0.2


def view(images: Tensor, generator: torch.Generator, size: int | None = None) -> Tensor:
    """A view of each image (n, C, H, W) in [0, 1]: a part of it, mirrored or not, in other colours.

    Args:
        generator: of the random numbers, on the CPU.
        size: height and width of the views; None is that of the images. A smaller one shows at most twice the area that
            it has in the image, so that things keep about their size.

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
    """The mean squared distance of the two views (n, d) of each image, both of length 1."""
    return (first - second).square().sum(dim=1).mean()


def uniformity(points: Tensor) -> Tensor:
    """log E exp(-2 |x - y|^2) over pairs of different points (n, d) of length 1; lower is more even."""
    n = len(points)
    return torch.pdist(points).square().mul(-2).logsumexp(dim=0) - torch.log(torch.tensor(n * (n - 1) / 2))
