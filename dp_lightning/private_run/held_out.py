"""Validation is about records that are held out.

What a validation computes is logged as it is, and chooses checkpoints, learning rates and the end of a run. Of training
examples that would lie outside the guarantee.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, SubsetRandomSampler

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.records import places_of_shared_records
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
                f"{len(shared)} of the {len(places)} validation examples are training examples, such as the one at "
                f"index {shared[0]} of the validation set: what is computed from them, and every choice by it, would "
                "lie outside the guarantee. Validate on examples that are held out, as a Subset or by their list as "
                "the loader's sampler (any other sampler counts as one of all examples), or turn validation off by "
                "trainer.limit_val_batches: 0. What training_step logs of training examples is listed in the statement "
                "as unprotected."
            )


def _size(dataset: Any) -> int | None:
    """How many elements can be read by index; None where that is not known."""
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            return len(dataset)
    return None


def _places(loader: Any, size: int) -> Sequence[int]:
    """Those that a loader may draw: the ones that its sampler holds, and for other samplers all."""
    sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is SubsetRandomSampler:
        sampler = sampler.indices
    if not isinstance(sampler, Sequence | Tensor | np.ndarray):
        return range(size)
    try:
        return sorted({range(size)[place] for entry in sampler for place in np.atleast_1d(entry).tolist()})
    except (TypeError, IndexError):  # names of another kind
        return range(size)
