"""Records the signal-to-noise ratio of the privatized gradient, whole and by parameter, which costs no privacy."""

import json
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from dp_lightning.analysis import signal_to_noise
from dp_lightning.atomic_files import replacing
from dp_lightning.callbacks.privacy import private_run_of
from dp_lightning.processors import sent

_STATE = ("curve", "curves", "_epochs", "_sizes", "_totals", "_count")


class SignalToNoise(pl.Callback):
    """At the end of each epoch, logs ``privacy/snr`` and writes ``snr.json``: ||G|| / ||N|| over its logical steps.

    The file has the ratio of the whole gradient and that of each parameter tensor:

        {"steps": [per epoch], "snr": [per epoch], "by_parameter": {name: {"size": d, "snr": [per epoch]}}}

    A parameter that was frozen at first has null in the epochs before it was trained. In the epoch in which parameters
    join, the ratios are those of the steps since then.

    This costs no privacy: the ratios are computed from the privatized gradient, which is released, its size, and the
    noise level, which is public. Any function of a release and of public values is post-processing (Dwork et al. 2006).

    The callback reads the gradient before the transforms of ``PostProcessCallback``, so in ``Trainer(callbacks=[...])``
    it comes after ``PrivacyCallback`` and before ``PostProcessCallback``. A run without noise has no such ratio.

    Attributes:
        curve: ratio of the whole gradient in each epoch.
        curves: ratios of each parameter in the last epochs of ``curve``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[float] = []
        self.curves: dict[str, list[float]] = {}
        self._epochs: list[int] = []  # number of steps of each epoch
        self._sizes: dict[str, int] = {}
        self._totals: torch.Tensor | None = None  # sum of ||G~||^2 / s^2 of each parameter over the epoch
        self._count = 0  # number of steps in that sum

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        level = private_run_of(trainer).step.noise_deviation
        gradients = {n: p.grad for n, p in pl_module.named_parameters() if p.requires_grad and p.grad is not None}
        if level == 0 or not gradients:
            return
        if gradients.keys() != self._sizes.keys():  # at first, and where parameters are no longer frozen
            self._sizes = {name: gradient.numel() for name, gradient in gradients.items()}
            self._totals, self._count = None, 0
        # The ratios stay on the device: reading them would wait for the step.
        squared = torch.stack([gradient.norm() for gradient in gradients.values()]).square()
        ratios = squared / level**2
        self._totals = ratios if self._totals is None else sent(self._totals, ratios.device) + ratios
        self._count += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._totals is None:
            return
        totals, sizes = self._totals.tolist(), self._sizes
        self.curve.append(signal_to_noise(sum(totals), sum(sizes.values()) * self._count))
        self._epochs.append(self._count)
        for (name, size), total in zip(sizes.items(), totals, strict=True):
            self.curves.setdefault(name, []).append(signal_to_noise(total, size * self._count))
        pl_module.log("privacy/snr", self.curve[-1], on_step=False, on_epoch=True)
        self._totals, self._count = None, 0
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def _write(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        by_parameter = {
            name: {"size": self._sizes[name], "snr": [*[None] * (len(self.curve) - len(curve)), *curve]}
            for name, curve in self.curves.items()
        }
        found = {"steps": self._epochs, "snr": self.curve, "by_parameter": by_parameter}
        with replacing(private_run_of(trainer).folder / "snr.json") as file:
            file.write((json.dumps(found, indent=1) + "\n").encode())
