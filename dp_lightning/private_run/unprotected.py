"""Numbers computed from raw training examples that a run logs: they lie outside the guarantee, and nothing is chosen.

A checkpoint, a learning rate or the end of a run that is chosen by such a number, and a file that is named by it, would
tell it.
"""

import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dp_lightning.lightning_internals import logged_in_training
from dp_lightning.private_run.trainer_checks import Row, refuse

#: Numbers that the callbacks of this package log, from public numbers and what the mechanism has released.
POST_PROCESSING = frozenset({"privacy/epsilon", "privacy/max_grad_norm", "privacy/snr"})
# Names of numbers in a template of ModelCheckpoint, as {epoch} and {val/loss:.2f}.
_NAMES = re.compile(r"\{(.*?)[:}]")


class Unprotected:
    """Collects the names of numbers of raw examples, and counts the examples whose gradient is not finite.

    Attributes:
        names: names of the numbers that were logged while training.
        non_finite: number of these examples in the epoch, on their device, since reading it would wait for the device.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.non_finite: Tensor | int = 0

    def note_logged(self, trainer: pl.Trainer) -> None:
        """Every value logged while training may come from raw examples; the statement names them all.

        Raises:
            ConfigurationError: when something is chosen by one of them, or a file is named by it.
        """
        found = {result.meta.name for result in logged_in_training(trainer)} - POST_PROCESSING - self.names
        if found:
            self.names |= found
            self.check(trainer)

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse to choose by numbers computed from raw training examples, and to put them into names of files.

        Raises:
            ConfigurationError: with a line for each.
        """
        refuse(*self._chosen(trainer))

    def _chosen(self, trainer: pl.Trainer) -> Iterator[Row]:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        readers: list[Any] = [each for each in callbacks if isinstance(each, ModelCheckpoint | EarlyStopping)]
        monitors = [(reader, reader.monitor) for reader in readers]
        monitors += [(each.scheduler, each.monitor) for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
        for reader, monitor in monitors:
            yield (
                monitor is not None and self._is_raw(monitor),
                f"{type(reader).__name__}.monitor is '{monitor}': choosing by a number computed from raw training "
                "examples lies outside the guarantee. Monitor a validation metric, such as val/accuracy.",
            )
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                for name in _NAMES.findall(f"{callback.filename} {callback.CHECKPOINT_NAME_LAST}"):
                    yield (
                        self._is_raw(name),
                        f"filename of {type(callback).__name__} has {{{name}}}, a number computed from raw training "
                        "examples: the file's name would tell it. Take it out, or name a validation metric.",
                    )

    def _is_raw(self, name: str) -> bool:
        # Lightning adds these to the name of a value that is logged by step and by epoch.
        plain = name.removesuffix("_step").removesuffix("_epoch")
        return not {name, plain}.isdisjoint(self.names) or name.startswith(("train", "unprotected"))

    def report_non_finite(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the count of the epoch and warn; reading waits for the device and for the other ranks."""
        found = torch.as_tensor(self.non_finite, device=pl_module.device)
        count, self.non_finite = int(trainer.strategy.reduce(found, reduce_op="sum")), 0
        if count:
            pl_module.log("unprotected/non_finite_gradients", float(count), on_step=False, on_epoch=True)
            rank_zero_warn(
                f"Examples with a gradient that is not finite in epoch {trainer.current_epoch}: {count}. What is not "
                "finite contributed nothing. Look for an overflow: a learning rate or a loss that is too large."
            )
