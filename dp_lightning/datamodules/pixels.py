"""Converts the bytes of images to what a network receives."""

from collections.abc import Sequence

import torch
from torch import Tensor


class PixelNormalization:
    """(x / 255 - mean) / std for each channel, on the device of the images.

    Args:
        mean: mean of each channel on the scale 0 to 1, or one for all; a public constant.
        std: standard deviation, likewise; above 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(-1, 1, 1)
        self._shift = -(torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64))
        self._shift = self._shift.float().view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (n, C, H, W) to float32."""
        scale, shift = (_on(images.device, constants) for constants in (self._scale, self._shift))
        return images.to(torch.float32).mul_(scale).add_(shift)


def _on(device: torch.device, constants: Tensor) -> Tensor:
    """A few numbers on a device. A copy would wait for a GPU; numbers that a kernel is started with do not."""
    if device == constants.device:
        return constants
    return torch.stack([torch.full((), c, device=device) for c in constants.flatten().tolist()]).view(constants.shape)
