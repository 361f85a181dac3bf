"""Momentum as a transform, for optimizers whose update is not linear in it.

Heavy-ball (Polyak 1964), as in torch.optim.SGD:

    M <- beta M + G,                output M.

Exponential average with Nesterov's look-ahead, as in Muon (Jordan et al. 2024):

    M <- beta M + (1 - beta) G,     output (1 - beta) G + beta M.

Both start from M = 0. G is the privatized gradient.
"""

from typing import Literal, Unpack

import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import Entry, EntrywiseLinear, Memory
from dp_lightning.postprocess.transform import AppliesTo, Where


class Momentum(EntrywiseLinear):
    """Momentum on the privatized gradient.

    Args:
        beta: decay in [0, 1).
        kind: "heavy_ball" (Polyak 1964) or "ema_nesterov" (Jordan et al. 2024).

    Raises:
        ConfigurationError: `beta` outside [0, 1), or an unknown `kind`.
    """

    has_momentum = has_memory = True

    def __init__(
        self,
        beta: float = 0.9,
        *,
        kind: Literal["heavy_ball", "ema_nesterov"] = "heavy_ball",
        applies_to: AppliesTo = "matrices",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to=applies_to, **where)
        if not 0 <= beta < 1:
            raise ConfigurationError(f"Momentum: beta must lie in [0, 1), got {beta}")
        if kind not in ("heavy_ball", "ema_nesterov"):
            raise ConfigurationError(f"Momentum: kind must be 'heavy_ball' or 'ema_nesterov', got {kind!r}")
        self.beta = beta
        self.kind = kind

    def step(self, value: Entry, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Entry, Memory]:
        previous = memory.entries["momentum"] if memory.entries else value.zeros()
        if self.kind == "heavy_ball":
            momentum = self.beta * previous + value
            return momentum, Memory({"momentum": momentum})
        momentum = self.beta * previous + (1 - self.beta) * value
        return (1 - self.beta) * value + self.beta * momentum, Memory({"momentum": momentum})
