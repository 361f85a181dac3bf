"""What a module sees of its trainer during a private step: only public numbers.

A trainer leads to all that a run has: counters of physical batches, logged numbers, the optimizer, callbacks, the data.
During the step another object stands in its place. It reads what is known without the data, refuses everything else by
name, and cannot be changed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from dp_lightning.errors import ModelError

PUBLIC = frozenset(
    {
        *("current_epoch", "global_step", "max_epochs", "max_steps", "min_epochs", "min_steps"),
        *("estimated_stepping_batches", "num_training_batches", "check_val_every_n_epoch", "log_every_n_steps"),
        *("world_size", "num_nodes", "num_devices", "global_rank", "local_rank", "node_rank", "is_global_zero"),
        *("training", "validating", "testing", "predicting", "evaluating", "sanity_checking"),
        *("precision", "fast_dev_run", "default_root_dir"),
    }
)
"""Plain values of a trainer that do not depend on how many physical batches a step has."""


class PublicTrainer:
    """Stands in the place of a trainer.

    Raises:
        ModelError: naming what is read or set that is not public.
    """

    __slots__ = ("_trainer",)
    # LightningModule.print prints by itself where there is none.
    progress_bar_callback = None

    def __init__(self, trainer: pl.Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        if name in PUBLIC:
            return getattr(self._trainer, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(
            f"training_step reads trainer.{name}, directly or by a method such as self.optimizers(). In a private "
            "step only public numbers of the trainer can be read, such as global_step and current_epoch. Move code "
            "that needs more to a hook or a callback; log with self.log."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise ModelError(
            f"training_step sets trainer.{name}. What is computed from an example may leave the step only as its "
            "gradient. Move it to a hook or a callback; log with self.log."
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.print(*args, **kwargs)


@contextmanager
def only_public(trainer: pl.Trainer, owners: Iterable[object]) -> Iterator[None]:
    """Replace the trainer wherever it is an attribute of one of ``owners``."""
    places = [(vars(owner), name) for owner in owners for name, value in vars(owner).items() if value is trainer]
    public = PublicTrainer(trainer)
    for attributes, name in places:
        attributes[name] = public
    try:
        yield
    finally:
        for attributes, name in places:
            attributes[name] = trainer
