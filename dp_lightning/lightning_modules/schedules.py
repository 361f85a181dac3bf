"""Learning-rate schedules that count logical steps."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dp_lightning.errors import ConfigurationError


class WarmupCosine(LRScheduler):
    """Linear warm-up, then cosine decay to zero (Loshchilov and Hutter 2017).

    With T steps and a warm-up of w = ceil(warmup_fraction * T) steps the factor at step t is (t + 1) / w for t < w, and
    (1 + cos(pi * (t - w) / (T - w))) / 2 after that.

    Args:
        warmup_fraction: fraction of the run spent on the warm-up, in [0, 1).
        num_steps: T, logical steps; None takes it from the privacy plan, as ``dpl`` does.
    """

    def __init__(self, optimizer: Optimizer, warmup_fraction: float = 0.05, num_steps: int | None = None) -> None:
        if not 0 <= warmup_fraction < 1:
            raise ConfigurationError(f"lr_scheduler.warmup_fraction is {warmup_fraction}; it must be in [0, 1).")
        self.warmup_fraction, self.num_steps = warmup_fraction, num_steps
        super().__init__(optimizer)

    def set_num_steps(self, num_steps: int) -> None:
        """Set T before the first step, if it was not given."""
        if self.num_steps is None:
            self.num_steps = num_steps
            for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                group["lr"] = lr
            self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Without T, which belongs to the plan of the run that resumes."""
        return {key: value for key, value in super().state_dict().items() if key != "num_steps"}

    def factor(self, step: int) -> float:
        """The factor of the learning rate at logical step ``step``, counted from 0."""
        if self.num_steps is None:
            raise ConfigurationError("lr_scheduler.num_steps is not set and no privacy plan gives it.")
        warmup = math.ceil(self.warmup_fraction * self.num_steps)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(self.num_steps - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def get_lr(self) -> list[float]:  # type: ignore[override]
        if self.num_steps is None and self.last_epoch <= 0:  # it may be set before the first step
            return [float(base) for base in self.base_lrs]
        return [float(base) * self.factor(self.last_epoch) for base in self.base_lrs]
