"""The run that is analysed: its model, its data, its noise at each batch size, its gradients without noise.

No privacy guarantee covers these gradients.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback
from dp_lightning.commands.fit_settings import Stopped, num_train_of
from dp_lightning.commands.pricing import plan_of
from dp_lightning.commands.quiet import quiet
from dp_lightning.commands.training import command_line
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import as_matrix
from dp_lightning.postprocess.matrix import is_matrix
from dp_lightning.privacy.bands import coefficients, deviations
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.private_run.run import response_of
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

#: Settings of ``privacy`` that change a number over the steps; the analysis takes that of the first ones.
CHANGING = ("noise_schedule", "clip_schedule", "adaptive_clipping")
_BATCH_SIZES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(eq=False)
class Measured(pl.Callback):
    """Gradients without noise, taken from the logical steps of a fit.

    Attributes:
        norms: Norm of the whole gradient in each draw.
        matrices: The gradient of each matrix, (m, n), averaged over the draws, on the CPU.
    """

    num_batches: int
    norms: list[float] = field(default_factory=list)
    matrices: dict[str, Tensor] = field(default_factory=dict)
    num_parameters: int = 0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        trained = {name: p.grad for name, p in pl_module.named_parameters() if p.requires_grad}
        gradients = {name: gradient.detach() for name, gradient in trained.items() if gradient is not None}
        self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm()))
        self.num_parameters = sum(gradient.numel() for gradient in gradients.values())
        for name, gradient in gradients.items():
            if is_matrix(gradient.shape):
                share = as_matrix(gradient).float().cpu() / self.num_batches
                self.matrices[name] = self.matrices[name] + share if name in self.matrices else share


class AnalysisRun:
    """A run as ``dpl fit`` would set it up, stopped before its first step.

    Args:
        arguments: Options of ``dpl fit``.
        checkpoint: File to load weights from; None keeps the initial weights.
        num_batches: Number of Poisson draws to average over.
        batch_sizes: Expected batch sizes to compare; None for the paper's.

    Raises:
        DpLightningError: if a setting is wrong; the message names it and the fix.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        checkpoint: Path | None,
        *,
        num_batches: int = 1,
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        cli = command_line(["fit", *arguments, "--trainer.logger", "false"], Stopped)
        self.module: pl.LightningModule = cli.model
        self.data: Any = cli.datamodule
        self.num_train = num_train_of(cli)
        self.settings = cli.config.fit.privacy.as_dict()
        self._trainer = cli.config.fit.trainer.as_dict()
        self._optimizer = cli.config.fit.as_dict().get("optimizer") or {}
        callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        self._chain = next(each.chain for each in callbacks if isinstance(each, PostProcessCallback))
        self.num_batches, self.asked = num_batches, batch_sizes
        self.batch_size: int = self.settings["expected_batch_size"]
        self.clip_plan: ClipPlan = cli.privacy.clip_plan
        if self.settings["noise_multiplier"] == 0:
            raise ConfigurationError("privacy.noise_multiplier is 0: there is no noise to compare the signal with.")
        if checkpoint is not None:
            cli.privacy.change_batch_norm(self.module)
            self.module.load_state_dict(PrivateCheckpointIO().load_checkpoint(checkpoint)["state_dict"])

    @property
    def batch_sizes(self) -> list[int]:
        """Expected batch sizes to compare: the requested ones, or the paper's and the run's own."""
        bands = self.settings["bands"]
        most = self.num_train // (1 if bands == "auto" else bands)
        known = {size for size in (*_BATCH_SIZES, self.batch_size) if size <= most}
        return sorted(known if self.asked is None else set(self.asked))

    def plan(self, batch_size: int) -> PrivacyPlan:
        """The plan of the run with another batch size."""
        return plan_of(self.settings, self._trainer, num_train=self.num_train, batch_size=batch_size)

    def noise_level(self, batch_size: int) -> float:
        """Standard deviation of the noise in each entry of a gradient, the root mean square over the run's steps."""
        plan, scale = self.plan(batch_size), 1.0
        if plan.bands > 1:
            response = self._chain.filtered(response_of(self._optimizer.get("init_args", {}), plan.num_steps))
            chosen = coefficients(plan.bands, plan.num_steps, tuple(response))
            scale = float(torch.tensor(deviations(chosen, plan.num_steps)).square().mean().sqrt())
        return scale * plan.noise_level(self.clip_plan.sensitivity)

    def measure(self, batch_size: int) -> Measured:
        """The clipped mean gradients of Poisson draws at fixed parameters.

        They come from private steps without noise, with an optimizer whose learning rate is zero.
        """
        left_out = ("target_epsilon", "disk", "frozen_until", "bands", *CHANGING)
        settings = {key: value for key, value in self.settings.items() if key not in left_out}
        settings |= {"expected_batch_size": batch_size, "noise_multiplier": 0.0, "not_private": True}
        measured = Measured(self.num_batches)
        self.module.__dict__["configure_optimizers"] = lambda: SGD(self.module.parameters(), lr=0.0)
        try:
            # The private step prints that a run without noise is not private; nothing is trained here.
            with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), quiet():
                pl.Trainer(
                    **{name: self._trainer[name] for name in ("accelerator", "devices", "precision")},
                    callbacks=[PrivacyCallback(**{**settings, "reproducible": True}), measured],
                    max_steps=self.num_batches,
                    max_epochs=-1,
                    logger=False,
                    enable_checkpointing=False,
                    enable_model_summary=False,
                    limit_val_batches=0,
                    num_sanity_val_steps=0,
                    default_root_dir=folder,
                ).fit(self.module, self.data)
        finally:
            del self.module.__dict__["configure_optimizers"]
        return measured
