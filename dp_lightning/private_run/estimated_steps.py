"""How many steps a run takes, for the schedules that ask their trainer.

``configure_optimizers`` often reads ``trainer.estimated_stepping_batches``. Lightning counts the batches of the
training loader for it and divides by ``accumulate_grad_batches``. A private loader has no length, and it is made later.
During a private fit the trainer answers with T, the number of logical steps.
"""

from collections.abc import Callable

import lightning.pytorch as pl


class _Planned:
    """Marks the class that a trainer has for the time of a fit."""


def estimate_by_plan(trainer: pl.Trainer, num_steps: Callable[[], int]) -> None:
    """Let ``trainer.estimated_stepping_batches`` be what ``num_steps`` returns."""
    estimate_by_loader(trainer)
    kind = type(trainer)
    # A property of the class, which an attribute of the trainer could not hide.
    names = {"estimated_stepping_batches": property(lambda _: num_steps()), "__module__": kind.__module__}
    trainer.__class__ = type(kind.__name__, (_Planned, kind), names)


def estimate_by_loader(trainer: pl.Trainer) -> None:
    """Undo `estimate_by_plan` when the fit is over."""
    if isinstance(trainer, _Planned):
        trainer.__class__ = type(trainer).__bases__[1]
