"""What all ranks must share for one private step: settings, training set, and the resulting model."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.privacy.records import contents, records_of
from dp_lightning.ranks import Ranks


def require_same_settings(settings: dict[str, object], ranks: Ranks, device: torch.device) -> None:
    """Require that all ranks clip and sample with the same settings; every rank has to call it.

    Raises:
        ConfigurationError: on every rank, naming the settings that differ.
    """
    if differing := ranks.differing_facts(settings, device):
        raise ConfigurationError(
            f"The ranks have different settings: {', '.join(differing)} (on rank {ranks.rank}: "
            f"{', '.join(str(settings[name]) for name in differing)}). Start all of them with the same configuration."
        )


def require_same_data(dataset: Any, ranks: Ranks, device: torch.device) -> None:
    """Require the same training set in the same order on every rank, or an example could enter a step twice.

    Indices of subsets are compared, and attributes with one number for each element, such as labels.

    Raises:
        ConfigurationError: on every rank.
    """
    if ranks.size == 1:
        return
    bases: list[Any] = []
    records = records_of(dataset, bases)
    if ranks.differing_facts({"training set": (records, [numbers_of(base) for base in bases])}, device):
        raise ConfigurationError(
            "The ranks have different training sets, or the same one in another order, so an example could enter a "
            "step twice. Make splits and orders with a fixed seed (generator=torch.Generator().manual_seed(0))."
        )


def require_equal_replicas(module: pl.LightningModule, ranks: Ranks) -> None:
    """Require the same parameters and buffers on every rank; every rank has to call it.

    Raises:
        DpLightningError: on every rank, naming what differs.
    """
    if differing := ranks.differing({**dict(module.named_parameters()), **dict(module.named_buffers())}):
        raise DpLightningError(
            f"The ranks' models are no longer the same: {', '.join(differing[:3])}. Something after the private step "
            "differs between them, such as a callback, an optimizer, a buffer or a kind of processor. Resume from the "
            "newest checkpoint once the cause is fixed."
        )


def numbers_of(dataset: Any) -> dict[str, list[Any]]:
    """The attributes of a data set that hold one number for each element, by their names."""
    found = {}
    for name, value in sorted(contents(dataset).items()):
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            found[name] = value.tolist()
        elif isinstance(value, list | tuple) and isinstance(value[0], int | float):
            found[name] = list(value)
    return found
