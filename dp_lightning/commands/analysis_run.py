"""The run that an analysis looks at: its model, its data, and its noise at each batch size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dp_lightning.commands.composition import Stopped
from dp_lightning.commands.pricing import plan_of
from dp_lightning.commands.raw_gradients import clipped_gradients, load_weights
from dp_lightning.commands.training import command_line
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import as_matrix
from dp_lightning.postprocess.matrix import is_matrix
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import PrivacyPlan

_BATCH_SIZES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Measured:
    """Gradients without noise."""

    norms: list[float]
    """Of the whole gradient, one for each draw."""
    matrices: dict[str, Tensor]
    """The gradient of each matrix, (m, n), averaged over the draws, on the CPU."""
    num_parameters: int


class AnalysisRun:
    """A run as ``dpl fit`` would make it, stopped before its first step.

    Args:
        arguments: options of ``dpl fit``.
        checkpoint: its weights; None keeps those of a new run.
        num_batches: draws to average over.
        batch_sizes: expected batch sizes to compare; None is the paper's.

    Raises:
        DpLightningError: naming the setting and the fix.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        checkpoint: Path | None,
        *,
        num_batches: int = 1,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        if num_batches < 1:
            raise ConfigurationError(f"--batches is {num_batches}; it must be at least 1.")
        cli = command_line(["fit", *arguments, "--trainer.logger", "false"], Stopped)
        self.module: pl.LightningModule = cli.model
        self.data: Any = cli.datamodule
        self.settings = cli.config.fit.privacy.as_dict()
        self._trainer = cli.config.fit.trainer.as_dict()
        self.num_batches, self.asked = num_batches, batch_sizes
        self.batch_size: int = self.settings["expected_batch_size"]
        self.clip_plan: ClipPlan = cli.privacy.clip_plan
        if self.settings["noise_multiplier"] == 0:
            raise ConfigurationError("privacy.noise_multiplier is 0: there is no noise to compare the signal with.")
        if checkpoint is not None:
            load_weights(self.module, checkpoint)

    @property
    def batch_sizes(self) -> list[int]:
        """Expected batch sizes to compare: those asked for, or the paper's and that of the run.

        Raises:
            ConfigurationError: for one that was asked for and is above the number of examples.
        """
        given = (*_BATCH_SIZES, self.batch_size) if self.asked is None else self.asked
        found = sorted({size for size in given if 1 <= size <= self.data.num_train})
        if self.asked is not None and len(found) < len(set(self.asked)):
            raise ConfigurationError(
                f"--batch-sizes has {', '.join(map(str, sorted(set(self.asked) - set(found))))}; choose from 1 to the "
                f"number of training examples, {self.data.num_train}."
            )
        return found

    def plan(self, batch_size: int) -> PrivacyPlan:
        """The plan of the run with another batch size."""
        return plan_of(self.settings, self._trainer, num_train=self.data.num_train, batch_size=batch_size)

    def noise_level(self, plan: PrivacyPlan) -> float:
        """Standard deviation of the noise in each entry of the gradient, sigma S / B."""
        return plan.noise_multiplier * self.clip_plan.sensitivity / plan.expected_batch_size

    def measure(self, batch_size: int) -> Measured:
        """Take the gradients."""
        norms: list[float] = []
        sums: dict[str, Tensor] = {}
        count = 0

        def take(gradients: Any) -> None:
            nonlocal count
            norms.append(float(torch.stack(torch._foreach_norm(list(gradients.values()))).norm()))
            count = sum(gradient.numel() for gradient in gradients.values())
            for name, gradient in gradients.items():
                if is_matrix(gradient.shape):
                    share = as_matrix(gradient).float().cpu() / self.num_batches
                    sums[name] = sums[name] + share if name in sums else share

        clipped_gradients(
            self.module,
            self.data,
            privacy=self.settings,
            trainer={name: self._trainer[name] for name in ("accelerator", "devices", "precision")},
            batch_size=batch_size,
            num_batches=self.num_batches,
            take=take,
        )
        return Measured(norms, sums, count)
