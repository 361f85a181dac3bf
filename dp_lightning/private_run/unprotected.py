"""Numbers computed from raw training examples that a run logs; they lie outside the guarantee."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dp_lightning.lightning_internals import logged_in_training
from dp_lightning.private_run.trainer_checks import check_monitors

#: Numbers that the callbacks of this package log, from public numbers and what the mechanism has released.
POST_PROCESSING = frozenset({"privacy/epsilon", "privacy/snr"})


class Unprotected:
    """Collects the names of numbers of raw examples, and counts the examples whose gradient is not finite.

    Attributes:
        names: names of the numbers that were logged while training.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._non_finite: Tensor | int = 0

    def note_logged(self, trainer: pl.Trainer) -> None:
        """Every value logged while training may come from raw examples; the statement names them all.

        Raises:
            ConfigurationError: when something is chosen by one of them, or a file is named by it.
        """
        found = {result.meta.name for result in logged_in_training(trainer)} - POST_PROCESSING - self.names
        if found:
            self.names |= found
            check_monitors(trainer, self.names)

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
