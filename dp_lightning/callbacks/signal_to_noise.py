"""Logs the signal-to-noise ratio of the privatized gradient, which costs no privacy."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from dp_lightning.analysis import SnrMeter
from dp_lightning.callbacks.privacy import PrivacyCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.torch_internals import norms


class SignalToNoise(pl.Callback):
    """Logs ``privacy/snr`` at the end of each epoch: ||G|| / ||N|| over its logical steps (`SnrMeter`).

    It reads the privatized gradient before any post-processing, and the known level of the noise. It comes after
    ``PrivacyCallback`` and before ``PostProcessCallback``. A run without noise has no such ratio.

    Raises:
        ConfigurationError: when ``fit`` starts, where it stands elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[float] = []
        self._meter = SnrMeter()
        self._privacy: PrivacyCallback | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)]
        if not before or not isinstance(before[-1], PrivacyCallback):
            raise ConfigurationError(
                "SignalToNoise must come right after PrivacyCallback in Trainer(callbacks=[...]): it reads the "
                "gradient as PrivacyCallback leaves it."
            )
        self._privacy = before[-1]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert self._privacy is not None
        level = self._privacy.private_run.step.noise_level
        gradients = [p.grad for p in pl_module.parameters() if p.requires_grad and p.grad is not None]
        if level == 0 or not gradients:
            return
        # Left on the device: reading it would wait for the step.
        squared = torch.stack(norms(gradients)).square().sum()
        count = sum(gradient.numel() for gradient in gradients)
        self._meter.update(squared, noise_level=level, num_parameters=count)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter.count:
            self.curve.append(self._meter.snr)
            pl_module.log("privacy/snr", self.curve[-1], on_step=False, on_epoch=True)
            self._meter.reset()

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "epoch": self._meter.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve = list(state_dict["curve"])
        self._meter.load_state_dict(state_dict["epoch"])
