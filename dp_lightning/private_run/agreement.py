"""What all ranks must share for one private step: settings, training set, and the resulting model."""

import functools
from numbers import Integral
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from dp_lightning.checksums import fingerprint
from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.privacy.reading import ExampleReader, flatten
from dp_lightning.privacy.repeats import same_numbers
from dp_lightning.ranks import Ranks

_EXAMPLES, _NUMBERS, _SUMS = 64, 2**16, 4
# Of the spread of sums over elements, and of a sum: two kinds of processor decode and resize with small differences.
_NEAR, _ROUNDING = 0.05, 1e-9
# Of the elements that are the same in two readings; fewer may differ by what the data set draws.
_FEW, _MOST = 8, 0.9


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
    """Require the same training set in the same order on every rank, as far as some of its elements tell.

    An example that stands at another place on another rank could enter one step twice. Whole numbers, texts, subsets
    and persons are compared, and up to rounding the arrays of each element, read with the same random numbers. Elements
    that differ from one reading to the next tell nothing; where there are any, nearly all others have to differ from
    another rank's, since those may be equal in two readings by chance.

    Raises:
        ConfigurationError: on every rank.
    """
    if ranks.size == 1:
        return
    dataset, groups = reader.dataset, reader.groups
    sized: Any = dataset
    places = range(0, len(sized), max(len(sized) // _EXAMPLES, 1))
    words, first, again = zip(*(_read(sized, place) for place in places), strict=True)
    facts = {"training set": (words, _indices(dataset), None if groups is None else groups.ids)}
    sums, others = torch.stack(first), torch.stack(again)
    near = _NEAR * sums.std(0, correction=0) + _ROUNDING * sums.abs()
    unknown = ((sums - others).abs() > near).any(1)
    columns = torch.cat([sums, near, unknown.double().unsqueeze(1)], dim=1)
    most, least = (each.cpu() for each in ranks.extremes(columns.to(device)))
    known = most[:, -1] == 0
    differ = ((most - least)[:, :_SUMS] > most[:, _SUMS:-1]).any(1)[known]
    few = max(_FEW, _MOST * len(differ)) if not bool(known.all()) else 0
    if ranks.differing_facts(facts, device) or int(differ.sum()) > few:
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


def _read(dataset: Any, place: int) -> tuple[list[object], Tensor, Tensor]:
    """The whole numbers and texts of an element, and weighted sums of its arrays, (_SUMS,) float64, in two readings."""
    leaves, again = _leaves(dataset, place), _leaves(dataset, place)
    words = _whole_numbers(leaves)
    return words if words == _whole_numbers(again) else [], _weighted(leaves), _weighted(again)


def _leaves(dataset: Any, place: int) -> list[Any]:
    with same_numbers():
        return flatten(dataset[place])[0]


def _weighted(leaves: list[Any]) -> Tensor:
    """Sums of an element's numbers with pseudo-random weights: (_SUMS,) float64."""
    parts = [part for leaf in leaves if (part := _numbers(leaf)) is not None]
    numbers = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    numbers = numbers[:: max(len(numbers) // _NUMBERS, 1)]
    return _weights(len(numbers)) @ numbers


@functools.lru_cache(maxsize=8)
def _weights(count: int) -> Tensor:
    return torch.randn(_SUMS, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _numbers(leaf: Any) -> Tensor | None:
    """The numbers of a tensor, an array, an image or a number: (n,) float64; None for anything else."""
    try:
        array = leaf.detach().cpu().to_dense() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))
        numbers = torch.view_as_real(array.resolve_conj()) if array.is_complex() else array
        return numbers.reshape(-1).double().nan_to_num(0.0, 0.0, 0.0)  # the sums stay finite
    except (TypeError, ValueError, RuntimeError):  # a text, or an object
        return None


def _whole_numbers(leaves: list[Any]) -> list[object]:
    """Labels and the like."""
    found: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.numel() == 1 and not leaf.is_floating_point() and not leaf.is_complex():
                found.append(int(leaf))
        elif isinstance(leaf, Integral):
            found.append(int(leaf))
        elif isinstance(leaf, str):
            found.append(leaf)
    return found


def _indices(dataset: Dataset[Any]) -> list[object]:
    return [*map(int, dataset.indices), *_indices(dataset.dataset)] if isinstance(dataset, Subset) else []
