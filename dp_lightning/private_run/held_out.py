"""Validation is about records that are held out.

What a validation computes is logged as it is, and chooses checkpoints, learning rates and the end of a run. Of training
examples that would lie outside the guarantee.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset, SubsetRandomSampler

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.records import length_of, shared_places
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
        size = length_of(dataset)
        if size is None or isinstance(dataset, IterableDataset):
            continue
        drawn = getattr(loader, "sampler", None)
        drawn = drawn.indices if isinstance(drawn, SubsetRandomSampler) else drawn
        places = drawn if isinstance(drawn, Sequence) else range(size)
        if shared := shared_places(dataset, trained, places):
            raise ConfigurationError(
                f"{len(shared)} of the {len(places)} validation examples are training examples, such as the one at "
                f"index {shared[0]} of the validation set: what is computed from them, and every choice by it, would "
                "lie outside the guarantee. Validate on examples that are held out, as a Subset or by their "
                "list as the loader's sampler, or turn validation off by trainer.limit_val_batches: 0. What "
                "training_step logs of training examples is listed in the statement as unprotected."
            )
