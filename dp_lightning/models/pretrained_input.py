"""Converts images to what a pretrained network expects: its size, and its mean and standard deviation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PretrainedInput(nn.Module):
    """Converts images of the data module to the images that the network was trained on; nothing in it is trained.

    An image x that was normalised with the data's mean m and deviation s becomes (resize(x) s + m - m') / s' with the
    network's m' and s'. Each image is converted separately.

    Args:
        size: height and width for the network; images of another size are resized (bicubic). None leaves them.
        data_mean, data_std: mean and standard deviation of the data's normalisation, one per channel or one for all.
        mean, std: those of the network's normalisation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        *,
        size: tuple[int, int] | None,
        data_mean: Sequence[float],
        data_std: Sequence[float],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.size = size
        before_mean, before_std, after_mean, after_std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (data_mean, data_std, mean, std)
        )
        # Constants of the configuration, not part of the weights.
        self.register_buffer("scale", before_std / after_std, persistent=False)
        self.register_buffer("shift", (before_mean - after_mean) / after_std, persistent=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        in_channels: int,
        data_mean: Sequence[float],
        data_std: Sequence[float],
        size: int | None = None,
    ) -> "PretrainedInput":
        """Build it from timm's data configuration of ``model``; ``size`` replaces its height and width."""
        from timm.data import resolve_model_data_config  # timm is slow to import

        own = resolve_model_data_config(model)
        height, width = own["input_size"][1:] if size is None else (size, size)
        mean, std = own["mean"], own["std"]
        if in_channels != len(mean):
            mean, std = ((sum(values) / len(values),) for values in (mean, std))
        return cls(size=(height, width), data_mean=data_mean, data_std=data_std, mean=mean, std=std)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, *size)."""
        if self.size is not None and images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return images * self.scale + self.shift
