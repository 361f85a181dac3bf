"""Tries the learning-rate schedules of a run before its first step, while nothing is spent."""

import copy
import time
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import empty
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR

from dp_lightning.errors import ConfigurationError

# Each schedule is followed for so many times the run's steps, and so many steps at least, as long as that takes no more
# seconds. One that falls without an end, as StepLR does, is lowest in the second half of any stretch, so a schedule has
# an end if it is lowest in the first half.
_BEYOND, _LEAST, _SECONDS = 40, 10_000, 0.4
_FIX = "Make it as long as the run, whose steps configure_optimizers has in self.trainer.estimated_stepping_batches."
_BY_EPOCH = ' Lightning calls it once an epoch; a schedule whose length is in steps needs "interval": "step".'


def try_schedules(trainer: pl.Trainer, module: pl.LightningModule, steps: int) -> None:
    """Step a copy of each schedule as often as the run will, and name those that end far from the run's end.

    A schedule that follows a metric is left out, and so are those that an ``lr_scheduler_step`` of the module's steps.

    Args:
        steps: logical steps that are left.

    Raises:
        ConfigurationError: for a schedule that cannot be stepped so often.
    """
    epoch, taken = int(trainer.num_training_batches), trainer.global_step
    for config in [] if is_overridden("lr_scheduler_step", module) else trainer.lr_scheduler_configs:
        kind, every = type(config.scheduler), config.frequency
        if config.interval == "step":  # Lightning counts them anew in each epoch
            before, after = (n // epoch * (epoch // every) + n % epoch // every for n in (taken, taken + steps))
        else:
            before, after = (n // epoch // every for n in (taken, taken + steps))
        count = after - before
        if not count or config.reduce_on_plateau:
            continue
        rates = _rates(config.scheduler, count, kept=(module, trainer))
        if not rates or taken or issubclass(kind, CyclicLR | CosineAnnealingWarmRestarts):
            continue  # a run that resumes may have lost steps, and has been told at its start
        highest = max(rates)
        peak = next(k for k, rate in enumerate(rates) if rate >= 0.999 * highest)
        lowest = min(rates[peak:])
        end = rates.index(lowest, peak)
        last = min(rates[count - 1 : count + 1])
        unfinished = 2 * end < len(rates) and (peak > count or last > lowest + 0.1 * highest)
        idle = max(rates[max(0, min(int(0.95 * count), count - 2)) : count]) < 1e-3 * highest
        if unfinished or idle:
            rank_zero_warn(
                f"The schedule {kind.__name__} is not as long as the run, which calls its step {count:,} times. Its "
                f"learning rate is {highest:.3g} after {peak:,} calls, {lowest:.3g} after {end:,}, and {last:.3g} at "
                f"the end of the run. {_FIX}{_BY_EPOCH if config.interval == 'epoch' else ''}"
            )


def _rates(schedule: Any, count: int, kept: tuple[Any, ...]) -> list[float]:
    """The highest learning rate of the groups, at first and after each call of ``step``; empty if it cannot be copied.

    Args:
        kept: objects that the copy of the schedule shares with it.

    Raises:
        ConfigurationError: where the schedule cannot be stepped ``count`` times.
    """
    optimizer, rates, deadline = SGD([empty(0, requires_grad=True)]), list[float](), time.monotonic() + _SECONDS
    try:
        optimizer.defaults = schedule.optimizer.defaults
        optimizer.param_groups = copy.deepcopy([{**each, "params": []} for each in schedule.optimizer.param_groups])
        tried = copy.deepcopy(schedule, {id(schedule.optimizer): optimizer, **{id(each): each for each in kept}})
    except Exception:  # whatever a schedule of the user's own holds
        return rates
    with warnings.catch_warnings(action="ignore"):  # the optimizer takes no step
        for call in range(1, max(_BEYOND * count, _LEAST) + 1):
            rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
            if call > count and (0 < rates[-1] < 1e-100 or time.monotonic() > deadline):
                break
            try:
                tried.step()
            except Exception as error:
                if call > count:
                    return rates + rates[-1:] * len(rates)  # the schedule has ended
                raise ConfigurationError(
                    f"The schedule {type(schedule).__name__} is too short: the run calls its step {count:,} times, and "
                    f"call {call:,} raises {type(error).__name__}: {error} {_FIX}"
                ) from error
    return rates
