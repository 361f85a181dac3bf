"""A LightningModule's own ``training_step``, called outside of Lightning's loop."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


def training_loss(module: pl.LightningModule, batch: Any, batch_idx: int) -> Tensor:
    """The loss of the module's own ``training_step``."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(batch, batch_idx) if takes_index else module.training_step(batch)
    loss: Any = output["loss"] if isinstance(output, Mapping) else output
    return loss


@contextmanager
def silent(module: pl.LightningModule) -> Iterator[None]:
    """Nothing that the module logs is kept."""
    silenced = {"log": lambda *args, **kwargs: None, "log_dict": lambda *args, **kwargs: None}
    module.__dict__.update(silenced)
    try:
        yield
    finally:
        for name in silenced:
            module.__dict__.pop(name, None)
