"""Validation is about records that are held out.

What a validation computes is logged as it is, and chooses checkpoints, learning rates and the end of a run. Of training
examples that would lie outside the guarantee.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.records import places_of_shared_records
from dp_lightning.privacy.repeats import same_numbers
from dp_lightning.torch_internals import tree_leaves


def require_held_out(trained: Any, loaders: Any) -> None:
    """Refuse a validation on training examples.

    Args:
        trained: the training set.
        loaders: those of the validation, one or a collection; None for no validation.

    Raises:
        ConfigurationError: with how many there are, and the place of one.
    """
    for loader in tree_leaves(loaders):
        dataset: Any = getattr(loader, "dataset", None)
        size = _size(dataset)
        if size is None:
            continue
        places = _places(loader, size)
        if shared := places_of_shared_records(dataset, trained, places):
            raise ConfigurationError(
                f"{len(shared)} of the {len(places)} validation examples are "
                f"training examples, such as the one at index {shared[0]} of the validation set: what is computed "
                "from them, and every choice by it, would lie outside the guarantee. Validate on examples that are "
                "held out, or turn validation off by trainer.limit_val_batches: 0. What training_step logs of "
                "training examples is listed in the statement as unprotected."
            )


def _size(dataset: Any) -> int | None:
    """How many elements can be read by index; None where that is not known."""
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            return len(dataset)
    return None


def _places(loader: Any, size: int) -> Sequence[int]:
    """Those that a loader's sampler draws; all, where it draws no indices."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        batches = ([index] for index in getattr(loader, "sampler", ()))
    with same_numbers():
        found = list(chain.from_iterable(islice(batches, size)))
    try:
        places = sorted({range(size)[index] for index in found})
    except (TypeError, IndexError):  # names of another kind
        places = []
    return places or range(size)
