"""Exponential moving average of the weights, evaluated and checkpointed beside the weights themselves.

After logical step t = 0, 1, ... with weights x,

    average <- d_t average + (1 - d_t) x,    d_t = min(decay, (1 + t) / (10 + t)),

where the warm-up of d_t lets the first steps leave soon (De et al. 2022 use decay 0.9999). The average is computed from
privatized weights alone, so it costs no privacy.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from dp_lightning.callbacks.privacy import PrivacyCallback
from dp_lightning.errors import ConfigurationError

PREFIX = "averaged/"


class AveragedWeights(pl.Callback):
    """Keeps the average of the trained parameters and evaluates it where the module is evaluated.

    Each batch of a validation or test goes through a copy of the module with the averaged weights too, and whatever
    the module logs is logged a second time as ``averaged/<name>``. Frozen parameters and buffers are the module's own.
    Predictions are made with the weights that ``predict_with`` names. The average is saved in checkpoints; a run that
    goes on from a checkpoint without one starts it there.

    Args:
        decay: d in [0, 1); None keeps no average.
        predict_with: ``averaged`` or ``raw``.

    Raises:
        ConfigurationError: ``decay`` is out of range, or the module cannot be copied.
    """

    def __init__(self, decay: float | None = None, predict_with: Literal["averaged", "raw"] = "averaged") -> None:
        super().__init__()
        if decay is not None and not 0 <= decay < 1:
            raise ConfigurationError(f"averaging.decay is {decay}; choose from 0 to below 1, such as 0.999.")
        self.decay, self.predict_with = decay, predict_with
        self._num_updates = 0
        self._average: dict[str, Tensor] = {}
        self._copy: pl.LightningModule | None = None
        self._steps = 0

    @property
    def average(self) -> Mapping[str, Tensor]:
        """The averaged parameters by name; empty before the first fit."""
        return self._average

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.decay is None:
            return
        try:
            self._copy = copy.deepcopy(pl_module)  # before anything hooks into the module
        except Exception as error:
            raise ConfigurationError(
                f"averaging.decay needs a copy of {type(pl_module).__name__}, which cannot be copied ({error}). Set "
                "averaging.decay: null."
            ) from error

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.decay is None:
            return
        trained = {name: p.detach() for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._average.keys() != trained.keys():
            self._num_updates, self._average = 0, {name: p.clone() for name, p in trained.items()}
        self._average = {name: average.to(trained[name].device) for name, average in self._average.items()}
        self._steps = trainer.global_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, PrivacyCallback) and self.decay is not None:
                callback.postprocessing.append(f"moving average of the weights (decay {self.decay:g}, beside them)")

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not self._average or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        assert self.decay is not None
        decay = min(self.decay, (1 + self._num_updates) / (10 + self._num_updates))
        self._num_updates += 1
        parameters = dict(pl_module.named_parameters())
        torch._foreach_lerp_(
            list(self._average.values()), [parameters[name].detach() for name in self._average], 1 - decay
        )

    # Evaluation of the copy

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._prepare(trainer, pl_module)
        self._hook("on_validation_epoch_start")

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._prepare(trainer, pl_module)
        self._hook("on_test_epoch_start")

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, *inputs: Any
    ) -> None:
        self._evaluate(trainer, "validation_step", *inputs)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, *inputs: Any
    ) -> None:
        self._evaluate(trainer, "test_step", *inputs)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook("on_validation_epoch_end")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook("on_test_epoch_end")

    @torch.no_grad()
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.decay is None or self.predict_with == "raw":
            return
        if not self._average:
            raise ConfigurationError(
                "averaging.predict_with is 'averaged', and there is no average of the weights: give the ckpt_path of a "
                "run that had averaging.decay, or set averaging.predict_with: raw."
            )
        for name, parameter in pl_module.named_parameters():
            if name in self._average:
                parameter.copy_(self._average[name])

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "average": self._average} if self._average else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._num_updates, self._average = state_dict["num_updates"], dict(state_dict["average"])

    def _prepare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the copy the module with the averaged weights; they are shared, not copied again."""
        if self._copy is None or not self._average:
            return
        module = self._copy.to(pl_module.device).eval()
        module.trainer = trainer
        own = dict(pl_module.named_parameters())
        for name, parameter in module.named_parameters():
            average = self._average.get(name)
            parameter.data = own[name].data if average is None else average.to(own[name])
        for buffer, current in zip(module.buffers(), pl_module.buffers(), strict=True):
            buffer.copy_(current)

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            # Lightning looks for metrics in the module itself, unless they have a name.
            pl_module.log(PREFIX + name, value, *args, **{"metric_attribute": PREFIX + name, **kwargs})

        module.__dict__["log"] = log

    def _evaluate(
        self, trainer: pl.Trainer, name: str, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> None:
        if self._copy is None or not self._average:
            return
        step = getattr(self._copy, name)
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        inputs = [batch, *([batch_idx] if takes_index else []), *([] if dataloader_idx is None else [dataloader_idx])]
        with trainer.precision_plugin.val_step_context():
            step(*inputs)

    def _hook(self, name: str) -> None:
        if self._copy is not None and self._average:
            getattr(self._copy, name)()
