"""A fit of a configuration's module on random images: as ``dpl fit`` makes it, with other data and another loss.

The module, the optimizer, ``PrivacyCallback`` and the post-processing are the configuration's. The examples, the
numbers N = B and T, and the loss are replaced; schedules, validation and the configuration's own callbacks are left
out. A callback before ``PostProcessCallback`` reads the privatized gradient. No private image is read, and no model is
kept.
"""

import contextlib
import io
import itertools
import logging
import secrets
import warnings
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.commands.composition import prepare
from dp_lightning.commands.training import TrainingCLI
from dp_lightning.datamodules.base import ImageDataModule
from dp_lightning.errors import ConfigurationError, DpLightningError

Releases = Callable[[int, dict[str, Tensor]], None]
"""Called with the step number and the released sum of each parameter, on the CPU."""

Columns = Callable[[torch.Generator], tuple[Tensor, ...]]
"""Draws the tensors that follow each image and label, from a generator that is the same on all ranks."""

NewLoss = Callable[[pl.LightningModule, Callable[[Any], Any]], Callable[[Any], Tensor]]
"""Takes the module and its own loss of a batch, and returns the loss to use instead."""


class _SyntheticImages(Dataset[tuple[Any, ...]]):
    """Random images and labels, each followed by the tensors of its row in ``columns``.

    Args:
        key: seed of everything in the data set; all ranks share it.
        dtype, shape: dtype and shape of an image.
        num_classes: number of classes of the labels.
        columns: draws the columns.
    """

    def __init__(self, key: int, dtype: torch.dtype, shape: tuple[int, ...], num_classes: int, columns: Columns):
        self._key, self._dtype, self._shape, self._num_classes = key, dtype, shape, num_classes
        self._columns = columns(torch.Generator().manual_seed(key))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(self._key + 1 + index)
        if self._dtype == torch.uint8:
            image = torch.randint(256, self._shape, dtype=torch.uint8, generator=generator)
        else:
            image = torch.randn(self._shape, generator=generator)
        label = int(torch.randint(self._num_classes, (), generator=generator))
        return (image, label), *(column[index] for column in self._columns)


def fit_on_synthetic_images(
    settings: Mapping[str, Any],
    loss: NewLoss,
    columns: Columns,
    releases: Releases,
    *,
    examples: int,
    steps: int,
    noise_multiplier: float,
    largest: int | None = None,
) -> None:
    """A fit at q = 1.

    Args:
        settings: a whole configuration.
        loss, columns, releases: see `NewLoss`, `Columns` and `Releases`.
        examples: N = B.
        steps: T.
        noise_multiplier: sigma; 0 adds no noise.
        largest: limit on the examples of a physical batch, below the configuration's.

    Raises:
        DpLightningError: if a setting is wrong, or the module cannot take synthetic images; the message names it.
    """
    given = settings["privacy"]
    physical = given["max_physical_batch_size"]
    privacy = {
        **given,
        "expected_batch_size": examples,
        "target_epsilon": None,
        "noise_multiplier": noise_multiplier,
        "not_private": noise_multiplier == 0,
        "delta": min(given["delta"], 0.5 / examples),
        "accountant": "rdp",  # the epsilon of these runs is not used
        "frozen_until": None,  # so that each step is one of the whole network
        "max_physical_batch_size": physical if largest is None else min(physical, largest * given.get("augmult", 1)),
    }
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about data and schedules that are not the run's
        trainer = {
            **settings["trainer"],
            **{"max_steps": steps, "max_epochs": -1, "callbacks": None, "default_root_dir": folder},
            **{"limit_train_batches": None, "val_check_interval": None},
            **{"limit_val_batches": 0, "num_sanity_val_steps": 0, "max_time": None},
        }
        changed = {**settings, "privacy": privacy, "trainer": trainer}
        changed.pop("lr_scheduler", None)  # it may monitor a metric of the validation, which is left out
        cli = prepare(changed)
        cli.privacy.num_train = None
        shape = _replace_data_and_loss(cli, loss, columns)
        callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        place = next(k for k, callback in enumerate(callbacks) if isinstance(callback, PostProcessCallback))
        numbers = itertools.count()

        def look(trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
            gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
            sums = {name: g.detach().cpu() * examples for name, g in gradients.items() if g is not None}
            releases(next(numbers), sums)

        callbacks.insert(place, LambdaCallback(on_before_optimizer_step=look))
        notes = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        level = notes.level
        try:
            notes.setLevel(logging.WARNING)  # hides that max_steps is reached
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        except DpLightningError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ConfigurationError(
                f"The model fails on synthetic examples, images of shape {shape} with a label: "
                f"{type(error).__name__}: {error}. Synthetic examples need a data module of images and labels."
            ) from error
        finally:
            notes.setLevel(level)


def _replace_data_and_loss(cli: TrainingCLI, loss: NewLoss, columns: Columns) -> tuple[int, ...]:
    """Replace the data and the loss with synthetic ones, and return the shape of an image; no data is read."""
    module, data = cli.model, cli.datamodule
    assert isinstance(data, pl.LightningDataModule)
    known: Any = data
    dtype = torch.uint8 if isinstance(data, ImageDataModule) else torch.float32
    shape = (known.in_channels,) if known.image_size == 1 else (known.in_channels, *[known.image_size] * 2)

    def train_dataloader() -> DataLoader[Any]:
        key = data.trainer.strategy.broadcast(secrets.randbits(62))  # type: ignore[union-attr]
        return DataLoader(_SyntheticImages(key, dtype, shape, known.num_classes, columns), batch_size=1)

    vars(data)["train_dataloader"] = train_dataloader
    vars(data).update(prepare_data=lambda: None, setup=lambda stage=None: None)
    for owner in (module, data):
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if is_overridden(name, owner):
                vars(owner)[name] = _of_first(getattr(owner, name))
    own = module.training_step

    def own_loss(batch: Any) -> Any:
        output = own(batch, 0)
        return output["loss"] if isinstance(output, Mapping) else output

    changed = loss(module, own_loss)

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        return changed(batch)

    vars(module)["training_step"] = training_step
    return shape


def _of_first(hook: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Apply the user's hook to the user's part of a batch."""

    def on_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
        return [hook(batch[0], dataloader_idx), *batch[1:]]

    return on_batch_transfer
