"""Numbers computed from raw training examples that a run logs; they lie outside the guarantee."""

from collections import defaultdict
from fractions import Fraction

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from dp_lightning.lightning_internals import gathered_value, logged_in_step, logged_in_training
from dp_lightning.private_run.trainer_checks import check_monitors

#: Logged by the callbacks of this package, from public numbers and what the mechanism has released.
POST_PROCESSING = frozenset({"privacy/epsilon", "privacy/snr"})


# Largest denominator of a simple fraction. Of 50 losses one is taken for such.
_SIMPLE = 1000


class LoggedNumbers:
    """The numbers that were logged while training, by their tags."""

    _MANY = 4096  # tensors are brought to the host together

    def __init__(self) -> None:
        self._waiting: dict[str, list[Tensor]] = defaultdict(list)
        self._known: dict[str, NDArray[np.float32]] = {}

    def note(self, tag: str, value: Tensor) -> None:
        """One number, without waiting for its device."""
        self._waiting[tag].append(value.detach().float().reshape(()).clone())
        if len(self._waiting[tag]) >= self._MANY:
            self._read()

    def tag_of(self, number: float) -> str | None:
        """The tag under which it was logged; None for a simple fraction such as an accuracy, as many values are."""
        self._read()
        single = np.float32(number)
        if not np.isfinite(single) or np.float32(Fraction(number).limit_denominator(_SIMPLE)) == single:
            return None
        return next((tag for tag, numbers in self._known.items() if single in numbers), None)

    def _read(self) -> None:
        for tag, values in self._waiting.items():
            device = values[-1].device
            read = torch.stack([value.to(device) for value in values]).cpu().numpy()
            self._known[tag] = np.union1d(self._known.get(tag, read[:0]), read)
        self._waiting.clear()


class Unprotected:
    """Collects the names of such numbers, and counts the examples whose gradient is not finite.

    Attributes:
        names: tags that were logged while training.
        numbers: what was logged under them.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.numbers = LoggedNumbers()
        self._non_finite: Tensor | int = 0

    def note_logged(self, trainer: pl.Trainer) -> None:
        """Every value logged while training may come from raw examples; the statement names them all.

        Raises:
            ConfigurationError: when something is chosen by one of them.
        """
        raw = [result for result in logged_in_training(trainer) if result.meta.name not in POST_PROCESSING]
        for result in raw:
            if (number := logged_in_step(result)) is not None:
                self.numbers.note(result.meta.name, number)
        found = {result.meta.name for result in raw} - self.names
        if found:
            self.names |= found
            check_monitors(trainer, self.names)

    def note_epoch(self, trainer: pl.Trainer) -> None:
        """The numbers that this rank has gathered in the epoch so far."""
        for result in logged_in_training(trainer):
            if result.meta.name not in POST_PROCESSING and (mean := gathered_value(result)) is not None:
                self.numbers.note(result.meta.name, mean)

    def add_non_finite(self, count: Tensor) -> None:
        """Count examples, without waiting for their device."""
        self._non_finite = self._non_finite + count

    def report_non_finite(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the count of the epoch and warn; reading waits for the device and for the other ranks."""
        found = torch.as_tensor(self._non_finite, device=pl_module.device)
        count, self._non_finite = int(trainer.strategy.reduce(found, reduce_op="sum")), 0
        if count:
            pl_module.log("unprotected/non_finite_gradients", float(count), on_step=False, on_epoch=True)
            rank_zero_warn(
                f"Examples with a gradient that is not finite in epoch {trainer.current_epoch}: {count}. What is not "
                "finite contributed nothing. Look for an overflow: a learning rate or a loss that is too large."
            )
