"""Saved hyperparameters are settings: they go into every checkpoint and to the loggers, and training data does not."""

import io
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.torch_internals import tree_leaves


def check_hyperparameters(trainer: pl.Trainer, module: pl.LightningModule, num_elements: int) -> None:
    """Refuse data among the hyperparameters of module and data module, and say where reading them runs code.

    Args:
        num_elements: of the training set; what has as many entries may hold all of them.

    Raises:
        ConfigurationError: naming the hyperparameter.
    """
    for owner in (module, getattr(trainer, "datamodule", None)):
        if not isinstance(owner, HyperparametersMixin):
            continue
        for name, value in owner.hparams.items():
            if any(_is_data(part, num_elements) for part in (value, *tree_leaves(value))):
                raise ConfigurationError(
                    f"The hyperparameter {name} of {type(owner).__name__} is a {type(value).__name__} that holds data: "
                    "it would go into every checkpoint and to the loggers. Leave it out with "
                    f"save_hyperparameters(ignore=['{name}']), or save a name for it."
                )
        file = io.BytesIO()
        try:
            torch.save(dict(owner.hparams), file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:  # of any class, as the user's own code may raise it
            rank_zero_warn(
                f"The hyperparameters of {type(owner).__name__} have objects that torch does not read without running "
                f"code ({type(error).__name__}): resume from this run's checkpoints with weights_only=False."
            )


def _is_data(value: Any, num_elements: int) -> bool:
    if isinstance(value, Dataset | DataLoader | pl.LightningDataModule):
        return True
    try:
        return not isinstance(value, str) and len(value) >= num_elements
    except TypeError:  # without a length
        return False
