"""Tries a LightningModule's own ``training_step`` on a few examples before the first step of a run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate
from torchmetrics import Metric

from dp_lightning.callbacks.example_gradients import GradientSettings
from dp_lightning.callbacks.made_up import MadeUp
from dp_lightning.callbacks.own_step import silent, training_loss
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.checks.losses import Division, refuse_randomness
from dp_lightning.privacy.checks.per_example import check_per_example
from dp_lightning.privacy.gradients import GradientEngine

_EXAMPLES = 8
# Together: some losses mix examples in larger batches only.
_MANY = 64
# Of one example: enough to see that its views add up.
_VIEWS = 2


def try_model(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    engine: GradientEngine,
    loader: DataLoader[Any],
    settings: GradientSettings,
    *,
    max_rows: int,
) -> None:
    """Check that an example's loss and gradient do not depend on the batch around it; nothing is logged.

    Args:
        trainer: of the run.
        module: what is tried.
        engine: attached to it.
        loader: of the training set.
        settings: what an example's gradient is.
        max_rows: rows of a physical batch, for which there is memory.

    Raises:
        ModelError: naming what differs.
    """
    dataset: Any = loader.dataset
    # Spread out, since data sets are often sorted by class and a class weight shows only between classes.
    count = min(_EXAMPLES, len(dataset))
    size = min(_MANY, len(dataset), max(max_rows, _EXAMPLES))
    made_up = MadeUp(
        [dataset[k * len(dataset) // size] for k in range(size)],
        _num_classes(trainer, module),
        torch.Generator().manual_seed(0),
    )
    examples = [made_up.like(dataset[k * len(dataset) // count]) for k in range(count)]
    views = min(settings.augmult, _VIEWS)
    # A view is drawn for itself, as in a run: what is made up is numbers, and not the sizes of tensors.
    few = [
        [made_up.like(dataset[k * len(dataset) // count]) for _ in range(views)]
        for k in range(min(2 if views == 1 else 4, count))
    ]
    if settings.augmult > 1:
        _require_order(loader)
        _warn_of_equal_views(dataset)

    # Three parts: equal numbers, outliers, and the rest, where values that may mark something missing stand.
    cuts = [0, size // 4, size // 4 + size // 6, size]

    def many(marks: Literal["finite", "all"]) -> list[Any]:
        return [
            made_up.like(example, outlying=cuts[1] <= index < cuts[2], marks=marks if index >= cuts[2] else "none")
            for index, example in enumerate(made_up.with_other_integers())
        ]

    plain = [made_up.like(example) for example in made_up.seen]

    def batch_of(chosen: list[Any]) -> Any:
        with refuse_randomness("collate_fn or a batch transfer hook"):
            batch = trainer.precision_plugin.convert_input(loader.collate_fn(chosen))
            return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def divided(rows: list[Any], places: Sequence[int]) -> Division:
        parts = [rows[start:stop] for start, stop in pairwise(places) if stop > start]
        return Division(batch_of(rows), [batch_of(part) for part in parts], [len(part) for part in parts])

    try:
        with silent(module), _arithmetic(trainer):
            check_per_example(
                module,
                engine,
                lambda batch: training_loss(module, batch, 0),
                divided(examples, range(count + 1)),
                # Each for a module that does not take those before it.
                [divided(rows, cuts) for rows in (*([many("all")] * made_up.has_broken_marks), many("finite"), plain)],
                few=[
                    (batch_of([view for example in order for view in example]), [batch_of(one) for one in order])
                    for order in (few, few[::-1])
                ],
                augmult=views,
                loss_reduction=settings.loss_reduction,
            )
    except RuntimeError as error:
        if not isinstance(trainer.precision_plugin, MixedPrecision) or "type" not in str(error):
            raise
        raise ModelError(
            f"training_step does not run in float32, in which it is tried before the first step: {error}. With "
            f"trainer.precision: {trainer.precision} autocast chooses the types, so take conversions such as "
            ".bfloat16() out of the step."
        ) from error
    finally:
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.reset()


def _arithmetic(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Of a training step, but that losses in bfloat16 are too coarse to compare."""
    plugin = trainer.precision_plugin
    return nullcontext() if isinstance(plugin, MixedPrecision) else plugin.train_step_context()


def _require_order(loader: DataLoader[Any]) -> None:
    """Views are told by their places in the batch, so nothing may move them.

    Raises:
        ConfigurationError: for a ``collate_fn`` that is not torch's own.
    """
    if loader.collate_fn is not default_collate:
        raise ConfigurationError(
            "privacy.augmult above 1 needs the default collate_fn: the views of an example are known by their places "
            "in the batch, and a collate_fn of one's own might move them. Do its work in the data set."
        )


def _warn_of_equal_views(dataset: Any) -> None:
    views = [tree_leaves(dataset[0]) for _ in range(4)]
    same = all(
        torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other
        for view in views[1:]
        for leaf, other in zip(views[0], view, strict=True)
    )
    if same:
        rank_zero_warn(
            "privacy.augmult is above 1, but the training set's transform draws nothing at random: all views of an "
            "example are the same, which costs time and changes nothing. Add a random augmentation (data.augment: "
            "true), or remove privacy.augmult."
        )


def _num_classes(trainer: pl.Trainer, module: pl.LightningModule) -> int:
    """The number of classes where the data or the module say it, or 0."""
    datamodule = getattr(trainer, "datamodule", None)
    for holder in (datamodule, module, getattr(module, "hparams", None)):
        found = getattr(holder, "num_classes", None)
        if isinstance(found, int):
            return found
    return 0
