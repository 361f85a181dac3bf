"""The trainer's counts of batches during a private fit: those of the plan.

``configure_optimizers`` often makes a schedule from ``trainer.estimated_stepping_batches`` or
``trainer.num_training_batches``. Lightning takes them from the length of the training loader. A private loader has no
length, since the number of physical batches is random, and it is made later. During a private fit both count logical
steps. Only Lightning's own code still gets infinity as the number of training batches: its loops end an epoch by it,
and its progress bars count physical batches up to it.
"""

import inspect
import math
from collections.abc import Callable

import lightning.pytorch as pl

from dp_lightning.privacy.plan import PrivacyPlan, RunShape


class _Planned:
    """Marks the class that a trainer has for the time of a fit."""


def count_by_plan(trainer: pl.Trainer, shape: Callable[[], RunShape]) -> None:
    """Let ``estimated_stepping_batches`` and ``num_training_batches`` of a trainer count logical steps.

    Args:
        trainer: about to fit.
        shape: returns what the run draws and how often; called when a count is asked for.
    """
    count_by_loader(trainer)
    kind = type(trainer)

    def num_training_batches(self: pl.Trainer) -> int | float:
        frame = inspect.currentframe()
        asks = "" if frame is None or frame.f_back is None else str(frame.f_back.f_globals.get("__name__"))
        if asks.partition(".")[0] == pl.__name__.partition(".")[0]:
            return kind.num_training_batches.fget(self)  # type: ignore[attr-defined, no-any-return]
        return _steps_of_an_epoch(shape())

    names = {
        # Properties of the class, which attributes of the trainer could not hide.
        "estimated_stepping_batches": property(lambda _: shape().num_steps),
        "num_training_batches": property(num_training_batches),
        "__module__": kind.__module__,
    }
    trainer.__class__ = type(kind.__name__, (_Planned, kind), names)


def count_by_loader(trainer: pl.Trainer) -> None:
    """Undo `count_by_plan` when the fit is over."""
    if isinstance(trainer, _Planned):
        trainer.__class__ = type(trainer).__bases__[1]


def _steps_of_an_epoch(shape: RunShape) -> int:
    """The most logical steps that begin in one epoch: ceil(N / B), as a loader that keeps its last batch counts."""
    return math.ceil(shape.num_train / shape.expected_batch_size)


def epochs_of(plan: PrivacyPlan) -> int:
    """The epochs of N examples that the plan's steps take: ceil(T B / N)."""
    return math.ceil(plan.num_steps * plan.expected_batch_size / plan.num_train)
