"""Private members of Lightning, torchmetrics and jsonargparse that this package uses, and nothing else of them."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn


def average_of(trainer: pl.Trainer, module: nn.Module) -> str | None:
    """The callback of Lightning whose average of the weights the module holds since training has ended."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            pairs = zip(module.parameters(), callback._average_model.module.parameters(), strict=True)
            if all(torch.equal(mine, average) for mine, average in pairs):
                return type(callback).__name__
    return None
