"""Memory for what lives only until the next layer: patches and gradients that are used up.

On a CPU the first touch of memory that is not in the cache costs more than computing what is written there. A GPU's
allocator already reuses memory.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

Empty = Callable[..., Tensor]
"""Like ``torch.empty``, with ``dtype`` and ``device``."""


class Scratch:
    """One uninitialized tensor, for one caller at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for intermediate results, valid until the next call."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._buffer.numel() < prod(shape) or self._buffer.dtype != dtype:
            self._buffer = torch.empty(prod(shape), dtype=dtype)
        return self._buffer[: prod(shape)].view(shape)


class Workspace:
    """What a layer needs at a time."""

    def __init__(self) -> None:
        self.patches, self.gradients = Scratch(), Scratch()
