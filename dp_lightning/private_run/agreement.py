"""What all ranks must share for one private step: settings, training set, and the resulting model."""

from numbers import Integral
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from dp_lightning.checksums import fingerprint
from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.privacy.reading import ExampleReader, flatten
from dp_lightning.ranks import Ranks

_EXAMPLES = 64


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


def require_one_checkpoint(trainer: pl.Trainer, ranks: Ranks) -> None:
    """Require that all ranks resume from the same checkpoint, or none from any; every rank has to call it.

    Raises:
        ConfigurationError: on every rank, where they do not.
    """
    mark = None if trainer.ckpt_path is None else fingerprint(Path(trainer.ckpt_path))
    if ranks.differing_facts({"checkpoint": mark}, trainer.strategy.root_device):
        raise ConfigurationError(
            f"The ranks resume from different checkpoints; rank {ranks.rank} from {trainer.ckpt_path}. Give ckpt_path "
            "a file that every node sees, and start all of them with the same settings."
        )


def require_same_data(reader: ExampleReader, ranks: Ranks, device: torch.device) -> None:
    """Require the same training set in the same order on every rank, as far as labels, subsets and persons tell.

    An example that stands at another place on another rank could enter one step twice. Images are not compared, since
    random augmentation makes them differ.

    Raises:
        ConfigurationError: on every rank.
    """
    if ranks.size == 1:
        return
    dataset, groups = reader.dataset, reader.groups
    sized: Any = dataset
    places = range(0, len(sized), max(len(sized) // _EXAMPLES, 1))
    labels = [_whole_numbers(sized[place]) for place in places]
    facts = {"training set": (labels, _indices(dataset), None if groups is None else groups.ids)}
    if ranks.differing_facts(facts, device):
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


def _whole_numbers(example: Any) -> list[object]:
    """Labels and the like; images as bytes are left out, since augmentation may act on them too."""
    found: list[object] = []
    for leaf in flatten(example)[0]:
        if isinstance(leaf, Tensor):
            if not leaf.is_floating_point() and leaf.numel() == 1:
                found.append(int(leaf))
        elif isinstance(leaf, Integral):
            found.append(int(leaf))
        elif isinstance(leaf, str):
            found.append(leaf)
    return found


def _indices(dataset: Dataset[Any]) -> list[object]:
    return [*map(int, dataset.indices), *_indices(dataset.dataset)] if isinstance(dataset, Subset) else []
