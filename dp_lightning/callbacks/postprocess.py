"""The Lightning hook that applies a chain of transforms to the privatized gradients.

The hook is `on_before_optimizer_step`, where each parameter's `.grad` holds the privatized gradient. The callback reads
and writes `.grad`, and asks `PrivacyCallback` for the level of the noise in the gradient, which is public.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Chain, Kalman, Transform


class PostProcessCallback(Callback):
    """Transform the privatized gradients before the optimizer steps.

    The state of the transforms is saved in checkpoints under the names of the module's parameters.

    Args:
        transforms: applied in this order. None or an empty list leaves the gradients as they are.

    Raises:
        ConfigurationError: when training starts, what `Chain.check` refuses.
    """

    def __init__(self, transforms: list[Transform] | None = None) -> None:
        self.chain = Chain(transforms or ())
        self._privacy: PrivacyCallback | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.chain.transforms:
            return
        self._privacy = privacy_of(trainer)
        if self._privacy is not None:
            self._check_disk(self._privacy)
            run = self._privacy.private_run
            run.postprocessing += [type(transform).__name__ for transform in self.chain.transforms]
            run.response = self.chain.filtered(run.response)
        own = [group["momentum"] for each in trainer.optimizers for group in each.param_groups if group.get("momentum")]
        if own and any(transform.has_momentum for transform in self.chain.transforms):
            rank_zero_warn(
                f"The optimizer has momentum {own[0]:g}, and so have the transforms of PostProcessCallback: gradients "
                "are averaged twice. Set momentum of the optimizer to 0, and cycle_momentum=False in OneCycleLR."
            )
        shapes = {name: p.shape for name, p in pl_module.named_parameters() if p.requires_grad}
        self.chain.check(shapes, noise=self._noise())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._privacy is not None:  # whose own hook came first, and has chosen the noise
            self.chain.begin_noise(self._privacy.private_run.step.noise.coefficients)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = {
            name: parameter.grad
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        for name, transformed in self.chain(gradients, noise=self._noise()).items():
            gradients[name].copy_(transformed)

    def _check_disk(self, privacy: PrivacyCallback) -> None:
        """DiSK's gradients are made for its own filter; with another filter the result is neither method."""
        disk = privacy.disk
        if disk is None:
            return
        first = self.chain.transforms[0]
        everywhere = first.applies_to == "all" and first.include is None and not first.exclude
        if not isinstance(first, Kalman) or first.gain != disk.gain or not everywhere:
            raise ConfigurationError(
                f"privacy.disk has gain {disk.gain:g}: the first of postprocess.transforms must be its filter, "
                f"Kalman with gain {disk.gain:g} and applies_to: all, and without include and exclude"
            )

    def _noise(self) -> float | None:
        return None if self._privacy is None else self._privacy.private_run.step.noise_level

    def state_dict(self) -> dict[str, Any]:
        return self.chain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.chain.load_state_dict(state_dict)
