"""Memory that one physical batch after the other uses for its per-example gradients.

On a CPU the first touch of fresh memory costs more than forming what is written there. A GPU's allocator keeps memory
by itself.
"""

from math import prod

import torch
from torch import Tensor


class Workspace:
    """Tensors without content. Those of ``keep`` are the caller's until ``reset``, that of ``scratch`` until the next
    call of it."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._in_use = 0
        self._scratch = torch.empty(0)

    def reset(self) -> None:
        """Take back every tensor; the next physical batch asks for its own in the same order."""
        self._in_use = 0

    def keep(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that nobody else gets before ``reset``."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        if self._in_use == len(self._kept):
            self._kept.append(torch.empty(0))
        self._kept[self._in_use] = _at_least(self._kept[self._in_use], shape, dtype)
        tensor = self._kept[self._in_use]
        self._in_use += 1
        return tensor[: prod(shape)].view(shape)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for intermediate results."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        self._scratch = _at_least(self._scratch, shape, dtype)
        return self._scratch[: prod(shape)].view(shape)


def _at_least(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``buffer``, or a larger one."""
    if buffer.numel() >= prod(shape) and buffer.dtype == dtype:
        return buffer
    return torch.empty(prod(shape), dtype=dtype)
