"""Exponential moving average of the weights, evaluated and checkpointed beside the weights themselves.

After logical step t = 0, 1, ... with weights x,

    average <- d_t average + (1 - d_t) x,    d_t = min(decay, (1 + t) / (10 + t)),

where the warm-up of d_t makes the average forget the first steps soon (De et al. 2022 use decay 0.9999). The average is
computed from privatized weights alone, so it costs no privacy.
"""

import copy
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.saved_model import AVERAGE_STATE

PREFIX = "averaged/"


class AveragedWeights(pl.Callback):
    """Keeps the average of the trained parameters and evaluates it where the module is evaluated.

    Each batch of a validation or test goes through a copy of the module with the averaged weights too, made when the
    evaluation starts, and whatever the module logs is logged a second time as ``averaged/<name>``.
    Predictions are made with the weights that ``predict_with`` names. The average is saved in checkpoints; a run that
    resumes from a checkpoint without one starts it there.

    Args:
        decay: d in [0, 1); None keeps no average.
        predict_with: ``averaged`` or ``raw``.

    Raises:
        ConfigurationError: ``decay`` is out of range.
    """

    def __init__(self, decay: float | None = None, predict_with: Literal["averaged", "raw"] = "averaged") -> None:
        super().__init__()
        if decay is not None and not 0 <= decay < 1:
            raise ConfigurationError(f"averaging.decay is {decay}; choose from 0 to below 1, such as 0.999.")
        self.decay, self.predict_with = decay, predict_with
        self._num_updates = 0
        #: The averaged parameters by name; empty before the first fit.
        self.average: dict[str, Tensor] = {}
        self._copy: pl.LightningModule | None = None
        self._predicts = False  # the average and the weights have changed places

    @property
    def state_key(self) -> str:
        return AVERAGE_STATE

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.decay is None:
            self.average = {}  # of the checkpoint: it would no longer follow the weights
            return
        self._averaged_copy(trainer, pl_module)  # a module that cannot be copied fails now, not after an epoch
        trained = {name: p.detach() for name, p in pl_module.named_parameters() if p.requires_grad}
        if self.average.keys() != trained.keys():
            self._num_updates, self.average = 0, {name: p.clone() for name, p in trained.items()}
        self.average = {name: average.to(trained[name]) for name, average in self.average.items()}
        if (privacy := privacy_of(trainer)) is not None:
            privacy.private_run.postprocessing.append(
                f"moving average of the weights (decay {self.decay:g}, beside them)"
            )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.decay is not None:
            update = get_ema_multi_avg_fn(min(self.decay, (1 + self._num_updates) / (10 + self._num_updates)))
            parameters = dict(pl_module.named_parameters())
            update(list(self.average.values()), [parameters[name].detach() for name in self.average], None)
            self._num_updates += 1

    # Evaluation of the average

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.decay is not None and self.average:
            self._copy = self._averaged_copy(trainer, pl_module)
        self._hook(trainer, "epoch_start")

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *inputs: Any) -> None:
        self._hook(trainer, "batch_start", *inputs)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *inputs: Any
    ) -> None:
        self._hook(trainer, "batch_end", self._evaluate(trainer, *inputs), *inputs)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hook(trainer, "epoch_end")
        self._copy = None

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _averaged_copy(self, trainer: pl.Trainer, module: pl.LightningModule) -> pl.LightningModule:
        """The module as it is now, with the averaged weights; it shares them and the parameters without an average."""
        parameters = dict(module.named_parameters())
        shared = {id(parameter): parameter for parameter in parameters.values()}
        shared |= {id(parameters[n]): nn.Parameter(a.to(parameters[n]), False) for n, a in self.average.items()}
        averaged: pl.LightningModule = copy.deepcopy(module, shared)  # type: ignore[arg-type]
        averaged.trainer = trainer

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            # Lightning looks for metrics in the module itself, unless they have a name.
            module.log(PREFIX + name, value, *args, **{"metric_attribute": PREFIX + name, **kwargs})

        vars(averaged)["log"] = log
        return averaged

    def _evaluate(self, trainer: pl.Trainer, batch: Any, batch_idx: int, *dataloader_idx: int) -> Any:
        if self._copy is None:
            return None
        step = self._copy.test_step if trainer.testing else self._copy.validation_step
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        with trainer.precision_plugin.val_step_context():
            return step(batch, *([batch_idx] if takes_index else []), *dataloader_idx)

    def _hook(self, trainer: pl.Trainer, moment: str, *inputs: Any) -> None:
        if self._copy is not None:
            getattr(self._copy, f"on_{'test' if trainer.testing else 'validation'}_{moment}")(*inputs)

    # Predictions

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.predict_with == "raw":
            return
        if self.decay is not None and not self.average:
            raise ConfigurationError(
                "averaging.predict_with is 'averaged', but there is no average of the weights: give the ckpt_path of a "
                "run that had averaging.decay, or set averaging.predict_with: raw."
            )
        if self.decay is not None:
            self._exchange(pl_module)
        elif self.average:
            rank_zero_warn(
                "The checkpoint has an average of the weights, but predictions use the weights themselves, since "
                "averaging.decay is not set. Set it to the run's value to use the average."
            )

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._predicts:
            self._exchange(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_predict_end(trainer, pl_module)

    @torch.no_grad()
    def _exchange(self, module: pl.LightningModule) -> None:
        parameters = dict(module.named_parameters())
        for name, average in self.average.items():
            before = parameters[name].clone()
            parameters[name].copy_(average)
            average.copy_(before)
        self._predicts = not self._predicts

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "average": self.average} if self.average else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._num_updates, self.average = state_dict["num_updates"], dict(state_dict["average"])
