"""Memory for gradients that are formed and used up, one layer after the other.

On a CPU the first touch of fresh memory costs more than forming what is written there. A GPU's allocator already
reuses memory.
"""

from math import prod

import torch
from torch import Tensor


class Workspace:
    """One uninitialized tensor, for one caller at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for intermediate results, valid until the next call."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._buffer.numel() < prod(shape) or self._buffer.dtype != dtype:
            self._buffer = torch.empty(prod(shape), dtype=dtype)
        return self._buffer[: prod(shape)].view(shape)
