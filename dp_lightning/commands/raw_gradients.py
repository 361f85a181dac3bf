"""Gradients without noise, for analysis: what they show lies outside of every guarantee."""

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

Take = Callable[[Mapping[str, Tensor]], None]


class _Recorder(pl.Callback):
    """Hands out the gradient of every logical step."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.requires_grad}
        self._take({name: gradient.detach() for name, gradient in gradients.items() if gradient is not None})


def clipped_gradients(
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    *,
    privacy: Mapping[str, Any],
    trainer: Mapping[str, Any],
    batch_size: int,
    num_batches: int,
    take: Take,
) -> None:
    """The clipped mean gradients of Poisson draws at fixed parameters: private steps without noise and of length zero.

    Args:
        module: left with the parameters that it has.
        data: of the private run.
        privacy: settings of the private run; batch size, noise and seeds are replaced.
        trainer: ``accelerator``, ``devices`` and ``precision``.
        batch_size: B, by which the sums are divided.
        num_batches: number of draws.
        take: gets each gradient by parameter name; the tensors are reused.
    """
    settings = {key: value for key, value in privacy.items() if key not in ("target_epsilon", "disk")}
    settings |= {"expected_batch_size": batch_size, "noise_multiplier": 0.0, "not_private": True}
    settings |= {"reproducible": True}
    module.__dict__["configure_optimizers"] = lambda: SGD(module.parameters(), lr=0.0)
    try:
        # The private step says that a run without noise is not private; this one is none.
        with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            pl.Trainer(
                **trainer,
                callbacks=[PrivacyCallback(**settings), _Recorder(take)],
                max_steps=num_batches,
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                default_root_dir=folder,
            ).fit(module, data)
    finally:
        del module.__dict__["configure_optimizers"]


def load_weights(module: pl.LightningModule, checkpoint: Path) -> None:
    """Take the parameters and buffers of a checkpoint of the same module.

    Raises:
        DpLightningError: where it is no checkpoint, or one of another module.
    """
    saved = PrivateCheckpointIO().load_checkpoint(checkpoint)
    try:
        with torch.no_grad():
            module.load_state_dict(saved["state_dict"])
    except (KeyError, RuntimeError) as error:
        raise ConfigurationError(
            f"--ckpt-path {checkpoint} does not fit the configuration's model, {type(module).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Give the checkpoint of a run with the same model."
        ) from error
