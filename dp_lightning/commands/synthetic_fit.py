"""A fit of a configuration's module on random images, as ``dpl fit`` makes it; its loss may be replaced too.

The module, the optimizer, ``PrivacyCallback`` and the post-processing are the configuration's. The examples and the
numbers N = B and T are replaced; schedules, validation and the configuration's own callbacks are left out. No private
image is read, and no model is kept.
"""

import contextlib
import io
import itertools
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
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.commands.fit_settings import prepare
from dp_lightning.commands.quiet import quiet
from dp_lightning.datamodules.base import ImageDataModule
from dp_lightning.errors import ConfigurationError, DpLightningError

Releases = Callable[[int, dict[str, Tensor]], None]
"""Called with the step number and the released sum of each parameter, on the CPU."""

Columns = Callable[[torch.Generator], tuple[Tensor, ...]]
"""Draws the tensors that follow each image and label, from a generator that is the same on all ranks."""

NewLoss = Callable[[pl.LightningModule, Callable[[Any], Any]], Callable[[Any], Tensor]]
"""Takes the module and its own loss of a pair of images and labels, and returns the loss of ``(pair, *columns)``."""


def fit_on_synthetic_images(
    settings: Mapping[str, Any],
    loss: NewLoss | None = None,
    columns: Columns = lambda generator: (),
    releases: Releases = lambda step, sums: None,
    *,
    examples: int,
    steps: int,
    noise_multiplier: float,
    largest: int | None = None,
    bands: int = 1,
) -> tuple[float, ...]:
    """A fit at q = 1, without schedules of noise and clipping.

    Args:
        settings: a whole configuration.
        loss: see `NewLoss`; None keeps the module's own.
        columns, releases: see `Columns` and `Releases`.
        examples: N = b B.
        steps: T.
        noise_multiplier: sigma; 0 adds no noise.
        largest: limit on the examples of a physical batch, below the configuration's.
        bands: b.

    Returns:
        The coefficients of the noise.

    Raises:
        DpLightningError: if a setting is wrong, or the module cannot take synthetic images; the message names it.
    """
    given = settings["privacy"]
    physical = given["max_physical_batch_size"]
    privacy = {
        **given,
        "expected_batch_size": examples // bands,
        "bands": bands,
        **dict.fromkeys(("noise_schedule", "clip_schedule", "adaptive_clipping")),
        "num_train": None,
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
        cli.privacy.num_train = None  # the synthetic examples have a number of their own
        module, data = cli.model, cli.datamodule
        _replace_data(module, data, columns, examples)
        _replace_loss(module, loss)
        callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        place = next(k for k, callback in enumerate(callbacks) if isinstance(callback, PostProcessCallback))
        numbers = itertools.count()

        def look(trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
            gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
            sums = {name: g.detach().cpu() * (examples // bands) for name, g in gradients.items() if g is not None}
            releases(next(numbers), sums)

        def begin(trainer: pl.Trainer, module: pl.LightningModule) -> None:
            cli.privacy.private_run.without_gradient = None  # a loss of zero tests the noise

        # It sees the privatized gradient.
        callbacks.insert(place, LambdaCallback(on_train_start=begin, on_before_optimizer_step=look))
        try:
            with quiet():
                cli.trainer.fit(module, datamodule=data)
        except DpLightningError:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise ConfigurationError(
                f"The model fails on synthetic images with labels: {type(error).__name__}: {error}. Synthetic examples "
                "need a data module of images and labels."
            ) from error
        return cli.privacy.private_run.step.noise.coefficients


def _replace_data(module: pl.LightningModule, data: Any, columns: Columns, examples: int) -> None:
    """Let the data module give ``((image, label), *columns)``; its hooks and the module's see image and label."""
    views = [data.num_views] if getattr(data, "num_views", 1) > 1 else []
    shape = (examples, *views, data.in_channels, *([data.image_size] * 2 if data.image_size > 1 else []))

    def train_dataloader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(data.trainer.strategy.broadcast(secrets.randbits(62)))
        drawn = columns(generator)
        if isinstance(data, ImageDataModule):
            images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        else:
            images = torch.randn(shape, generator=generator)
        labels = torch.randint(data.num_classes, (examples,), generator=generator)
        if getattr(data, "multi_label", False):
            labels = torch.randint(2, (examples, data.num_classes), generator=generator).float()
        parts: tuple[Any, ...] = TensorDataset(images, labels), *drawn
        return DataLoader(StackDataset(*parts))

    vars(data).update(train_dataloader=train_dataloader, prepare_data=lambda: None, setup=lambda stage=None: None)
    for owner in (module, data):
        for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if is_overridden(name, owner):
                vars(owner)[name] = _of_first(getattr(owner, name))


def _of_first(hook: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Apply the user's hook to the user's part of a batch."""
    return lambda batch, dataloader_idx: [hook(batch[0], dataloader_idx), *batch[1:]]


def _replace_loss(module: pl.LightningModule, loss: NewLoss | None) -> None:
    own = module.training_step

    def own_loss(pair: Any) -> Any:
        output = own(pair, 0)
        return output["loss"] if isinstance(output, Mapping) else output

    changed = (lambda batch: own_loss(batch[0])) if loss is None else loss(module, own_loss)
    vars(module)["training_step"] = lambda batch, batch_idx: changed(batch)
