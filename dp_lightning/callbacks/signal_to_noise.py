"""Records the signal-to-noise ratio of the privatized gradient, whole and by parameter, which costs no privacy."""

import json
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from dp_lightning.analysis import SnrMeter
from dp_lightning.atomic_files import replacing
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.private_run.run import PrivateRun
from dp_lightning.processors import sent

#: Beside the privacy statement in a run's folder.
FILE = "snr.json"


class SignalToNoise(pl.Callback):
    """At the end of each epoch, logs ``privacy/snr`` and writes ``snr.json``: ||G|| / ||N|| over its logical steps.

    The file has the ratio of the whole gradient and that of each parameter tensor (`SnrMeter`):

        {"steps": [per epoch], "snr": [per epoch], "by_parameter": {name: {"size": d, "snr": [per epoch]}}}

    A parameter that was frozen at first has null in the epochs before its own.

    This costs no privacy: the ratios are computed from the privatized gradient, which is released, its size, and the
    noise level, which is public; the gradient without noise is never read. Any function of a release and of public
    values is post-processing (Dwork et al. 2006), and belongs to the same guarantee.

    It reads the gradient before the transforms of ``PostProcessCallback``, so it comes after ``PrivacyCallback`` and
    before those. A run without noise has no such ratio.

    Attributes:
        curve: of the whole gradient, per epoch.
        curves: of each parameter, for the last epochs of ``curve``. Where parameters join during an epoch, that epoch's
            are those of the steps since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[float] = []
        self.curves: dict[str, list[float]] = {}
        self._steps: list[int] = []
        self._sizes: dict[str, int] = {}
        self._whole, self._each = SnrMeter(), SnrMeter()
        self._counts: torch.Tensor | None = None  # the sizes, where the gradient is

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._counts = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.curve:  # a resumed run may have another folder
            self._write(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        level = _run(trainer).step.noise_level
        gradients = {n: p.grad for n, p in pl_module.named_parameters() if p.requires_grad and p.grad is not None}
        if level == 0 or not gradients:
            return
        # Left on the device: reading it would wait for the step.
        squared = torch.stack([gradient.norm() for gradient in gradients.values()]).square()
        if gradients.keys() != self._sizes.keys():  # at first, and where parameters are no longer frozen
            self._sizes, self._counts = {name: gradient.numel() for name, gradient in gradients.items()}, None
            self._each.reset()
        if self._counts is None:
            self._counts = sent(torch.tensor(list(self._sizes.values()), dtype=squared.dtype), squared.device)
        self._whole.update(squared.sum(), noise_level=level, num_parameters=sum(self._sizes.values()))
        self._each.update(squared, noise_level=level, num_parameters=self._counts)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._whole.count:
            return
        self.curve.append(self._whole.snr)
        self._steps.append(self._whole.count)
        for name, ratio in zip(self._sizes, self._each.snrs, strict=True):
            self.curves.setdefault(name, []).append(ratio)
        pl_module.log("privacy/snr", self.curve[-1], on_step=False, on_epoch=True)
        self._whole.reset()
        self._each.reset()
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        kept = {"curve": self.curve, "curves": self.curves, "steps": self._steps, "sizes": self._sizes}
        return {**kept, "whole": self._whole.state_dict(), "each": self._each.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve, self._steps = list(state_dict["curve"]), list(state_dict["steps"])
        self.curves = {name: list(curve) for name, curve in state_dict["curves"].items()}
        self._sizes = dict(state_dict["sizes"])
        self._whole.load_state_dict(state_dict["whole"])
        self._each.load_state_dict(state_dict["each"])

    def _write(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        by_parameter = {
            name: {"size": self._sizes[name], "snr": [*[None] * (len(self.curve) - len(curve)), *curve]}
            for name, curve in self.curves.items()
        }
        found = {"steps": self._steps, "snr": self.curve, "by_parameter": by_parameter}
        with replacing(_run(trainer).folder / FILE) as file:
            file.write((json.dumps(found, indent=1) + "\n").encode())


def _run(trainer: pl.Trainer) -> PrivateRun:
    privacy = privacy_of(trainer)
    assert privacy is not None
    return privacy.private_run
