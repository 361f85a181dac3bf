"""Validation is about records that are held out.

What a validation computes is logged as it is, and chooses checkpoints, learning rates and the end of a run. Of training
examples that would lie outside the guarantee.
"""

from typing import Any

from torch.utils.data import SubsetRandomSampler

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
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            continue
        sampler = getattr(loader, "sampler", None)
        places = [int(index) for index in sampler.indices] if isinstance(sampler, SubsetRandomSampler) else None
        if shared := places_of_shared_records(dataset, trained, places):
            raise ConfigurationError(
                f"{len(shared)} of the {len(dataset) if places is None else len(places)} validation examples are "
                f"training examples, such as the one at index {shared[0]} of the validation set: what is computed "
                "from them, and every choice by it, would lie outside the guarantee. Validate on examples that are "
                "held out, or turn validation off by trainer.limit_val_batches: 0. What training_step logs of "
                "training examples is listed in the statement as unprotected."
            )
