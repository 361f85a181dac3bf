"""Exponential moving average of the weights, which is validated, saved and, after training, kept.

The average is the weights after the first logical step. After each further one, with weights x and t = 1, 2, ... of
them in the average,

    average <- d_t average + (1 - d_t) x,    d_t = min(decay, (1 + t) / (10 + t)),

where the warm-up of d_t makes the average forget the first steps soon (De et al. 2022 use decay 0.9999). The average is
computed from privatized weights alone, so it costs no privacy.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_internals import Averaging


class AveragedWeights(Averaging):
    """Lightning's ``WeightAveraging`` with the warm-up of De et al., in private runs.

    The module has the average while it is validated and when training is over. A checkpoint has the average as
    ``state_dict``, and the weights from which a run resumes as ``current_model_state``. A checkpoint that Lightning
    saves with ``save_weights_only`` has no average, but the weights of its step. A run that resumes from a checkpoint
    without an average starts an average there; a run that resumes without ``decay`` starts from the average.

    Args:
        decay: d in [0, 1); None keeps no average.

    Raises:
        ConfigurationError: ``decay`` is out of range.
    """

    def __init__(self, decay: float | None = None) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise ConfigurationError(f"averaging.decay is {decay}; choose from 0 to below 1, such as 0.999.")
        super().__init__(use_buffers=False)
        self.decay = decay
        self._exchanged = False  # whether the module has the average, and the averaged model the weights

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning copies the module here, before its own setup may have made layers and while it is on the CPU.
        self.averaged, self._exchanged = None, False

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self.decay is not None and trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer, pl_module, "fit")
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.decay is None:
            return
        if self.averaged is None:
            super().setup(trainer, pl_module, "fit")
        assert self.averaged is not None
        self.averaged.to(pl_module.device)
        self.averaged.n_averaged = self.averaged.n_averaged.cpu()  # so that reading the count waits for no device
        if (privacy := privacy_of(trainer)) is not None:
            copy, run = self.averaged.module, privacy.private_run
            run.postprocessing.append(f"moving average of the weights (decay {self.decay:g})")
            run.weights = lambda: (pl_module if self._exchanged else copy).state_dict()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.averaged is None:
            return
        copy, t = self.averaged.module, int(self.averaged.n_averaged)
        decay = min(self.decay or 0.0, (1 + t) / (10 + t)) if t else 0.0
        get_ema_multi_avg_fn(decay)(list(copy.parameters()), list(pl_module.parameters()), self.averaged.n_averaged)
        for of_copy, buffer in zip(copy.buffers(), pl_module.buffers(), strict=True):
            of_copy.copy_(buffer)
        self.averaged.n_averaged += 1

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._exchanged = True

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self._exchanged = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning would copy the average, but the last checkpoints, from which a run may resume, are still to come.
        self.on_validation_epoch_start(trainer, pl_module)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if self.averaged is not None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            if self._exchanged:
                states = checkpoint["current_model_state"], checkpoint["state_dict"]
                checkpoint["state_dict"], checkpoint["current_model_state"] = states
