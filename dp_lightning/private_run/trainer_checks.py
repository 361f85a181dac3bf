"""Trainer and module settings that would break or blur the guarantee, each refused with what to change."""

import math
import os
import re
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import callbacks as standard
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, optim
from torch.nn.parameter import is_lazy

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.lightning_internals import detects_anomalies, records_modules, start_method, was_compiled
from dp_lightning.processors import all_finite
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO
from dp_lightning.strategies.private import NAME, PrivateStrategy
from dp_lightning.torch_internals import is_compiled

# Normalised updates, such as a sign or an orthogonal matrix, are trained with rates below 10.
_LARGEST_LR = 1e6
# Such as s3://, and file:/ where Lightning has shortened it.
_URL = re.compile(r"(^|/)[a-z][a-z0-9+.:-]+:/", re.IGNORECASE)
_REFUSED_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (
        standard.GradientAccumulationScheduler,
        "it changes the batch size. Set privacy.expected_batch_size and privacy.max_physical_batch_size instead",
    ),
    (standard.StochasticWeightAveraging, "it passes over the data again. Average weights without the data instead"),
    (standard.LearningRateFinder, "it takes steps on private data that no ledger counts. Tune on public data"),
    (standard.BatchSizeFinder, "it takes steps on private data. Set privacy.max_physical_batch_size by hand"),
    (standard.BaseFinetuning, "it changes the trained parameters during the run. Freeze them before fit"),
)


def check_settings(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what cannot be trained privately; nothing of the data is touched.

    Raises:
        ConfigurationError: for a setting of the trainer.
        ModelError: for a compiled module, or weights from which no step leads to others.
    """
    check_folders(trainer)
    _check_trainer(trainer)
    _check_callbacks(trainer)
    _check_compiled(module)
    if not module.automatic_optimization:
        raise ConfigurationError(
            "automatic_optimization is False: the order of gradient, noise and step would be open. Use automatic "
            "optimization with one optimizer."
        )
    _check_backward(trainer, module)
    _check_weights(module)


def check_order(trainer: pl.Trainer, privacy: pl.Callback) -> None:
    """Refuse callbacks that act on gradients before they are privatized, and a second one that privatizes them.

    Raises:
        ConfigurationError: naming the callback.
    """
    kind, callbacks = type(privacy), trainer.callbacks  # type: ignore[attr-defined]
    _refuse(
        sum(isinstance(callback, kind) for callback in callbacks) > 1,
        f"trainer.callbacks has several {kind.__name__}s, and a run has one plan. Leave one.",
    )
    names = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    for callback in callbacks:
        if callback is privacy:
            return
        _refuse(
            any(getattr(type(callback), name) is not getattr(pl.Callback, name) for name in names),
            f"{type(callback).__name__} stands before PrivacyCallback in trainer.callbacks and acts on gradients. Put "
            "PrivacyCallback first, so that every other callback sees the privatized gradient.",
        )


def _check_weights(module: pl.LightningModule) -> None:
    """Refuse weights that are not finite; those on a GPU are not waited for."""
    there = ((name, parameter) for name, parameter in module.named_parameters() if not is_lazy(parameter))
    lost = [name for name, parameter in there if parameter.device.type == "cpu" and not all_finite(parameter)]
    if lost:
        others = f", as are {len(lost) - 1} other parameters" if lost[1:] else ""
        raise ModelError(f"{lost[0]} is not finite before the first step{others}. Start from other weights.")


def check_folders(trainer: pl.Trainer) -> None:
    """Refuse URLs where a run writes: journals and statements are files of this machine.

    Raises:
        ConfigurationError: naming the setting.
    """
    folders: dict[str, Any] = {"trainer.default_root_dir": trainer.default_root_dir}
    folders |= {f"save_dir of {type(logger).__name__}": logger.save_dir for logger in trainer.loggers}
    for callback in trainer.checkpoint_callbacks:
        folders[f"dirpath of {type(callback).__name__}"] = getattr(callback, "dirpath", None)
    for setting, folder in folders.items():
        _refuse(
            folder is not None and _URL.search(str(folder)) is not None,
            f"{setting} is {folder}, a URL, and a run writes into folders of this machine. Give a path, such as runs, "
            "or mount what the URL names.",
        )


def check_precision(precision: object) -> None:
    """Refuse loss scaling (16-mixed) and coarse parameters and noise (16-true, bf16-true).

    Args:
        precision: the trainer's setting, before Lightning maps 16-mixed to bf16-mixed on a CPU.
    """
    _refuse(
        str(precision) not in ("None", "32", "32-true", "64", "64-true", "bf16", "bf16-mixed"),
        f"trainer.precision is {precision}: loss scaling or coarse noise would break the guarantee. Set it to 32-true, "
        "bf16-mixed or 64-true.",
    )


def _check_trainer(trainer: pl.Trainer) -> None:
    _refuse(
        bool(trainer.gradient_clip_val),  # Lightning does nothing for 0
        f"trainer.gradient_clip_val is {trainer.gradient_clip_val}: it would clip the noised gradient. Remove it; "
        "per-example clipping is privacy.max_grad_norm.",
    )
    _refuse(
        trainer.accumulate_grad_batches != 1,
        f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}: it would change the batch size that is "
        "accounted for. Remove it; set privacy.expected_batch_size, and privacy.max_physical_batch_size for memory.",
    )
    check_precision(trainer.precision)
    _check_processes(trainer)
    _check_counts(trainer)
    _refuse(detects_anomalies(trainer), "trainer.detect_anomaly stops at a step that depends on the data. Remove it.")
    _refuse(
        records_modules(trainer.profiler),  # type: ignore[attr-defined]
        f"trainer.profiler is {type(trainer.profiler).__name__}, whose hooks on modules keep something of each call. "  # type: ignore[attr-defined]
        "Set record_module_names: false in its init_args, or trainer.profiler: simple.",
    )


def _check_processes(trainer: pl.Trainer) -> None:
    """Who trains, and who writes checkpoints."""
    strategy = type(trainer.strategy)
    _refuse(
        not issubclass(strategy, SingleDeviceStrategy | PrivateStrategy),
        f"trainer.strategy is {strategy.__name__}: it would average the raw gradients of its processes, or cut the "
        f"model into pieces. Set trainer.strategy: {NAME}.",
    )
    _refuse(
        isinstance(trainer.strategy, PrivateStrategy) and start_method(trainer.strategy) != "popen",
        "trainer.strategy starts its processes by fork or spawn: what they spend would be lost with them. Leave "
        "start_method out, and run a script rather than a notebook.",
    )
    started = started_processes()
    _refuse(
        started is not None and started != trainer.num_nodes * trainer.num_devices,
        f"{started} processes were started, and trainer.num_nodes {trainer.num_nodes} x trainer.devices "
        f"{trainer.num_devices} are configured: each would train a model of its own on the same data. Make them agree.",
    )
    writer = type(trainer.strategy.checkpoint_io)
    _refuse(
        writer not in (TorchCheckpointIO, PrivateCheckpointIO),
        f"trainer.plugins has {writer.__name__}: its checkpoints would have no journal of steps beside them, so that "
        "no run could resume from them. Remove it; checkpoints are written whole and checked when they are read.",
    )


def _check_counts(trainer: pl.Trainer) -> None:
    """What is counted in batches, or cuts one short."""
    settings: Any = trainer
    _refuse(
        settings.log_every_n_steps < 1 and bool(trainer.loggers),
        f"trainer.log_every_n_steps is {settings.log_every_n_steps}; it must be at least 1. To log nothing, set "
        "trainer.logger: false.",
    )
    _refuse(
        settings.check_val_every_n_epoch is not None and settings.check_val_every_n_epoch < 1,
        f"trainer.check_val_every_n_epoch is {settings.check_val_every_n_epoch}; it must be at least 1. To skip "
        "validation, set trainer.limit_val_batches: 0.",
    )
    _refuse(settings.overfit_batches != 0, "trainer.overfit_batches repeats the same batch. Remove it.")
    _refuse(
        bool(getattr(trainer, "fast_dev_run", False)),
        "trainer.fast_dev_run cuts a logical batch short. Remove it; for a short run set trainer.max_steps: 2.",
    )
    _refuse(
        trainer.limit_train_batches not in (1, 1.0) or isinstance(trainer.limit_train_batches, int),
        f"trainer.limit_train_batches is {trainer.limit_train_batches}: it cuts a logical batch short. Remove it; for "
        "a short run set trainer.max_steps.",
    )
    _refuse(
        settings.reload_dataloaders_every_n_epochs != 0,
        "trainer.reload_dataloaders_every_n_epochs would replace the data set during the run. Remove it.",
    )
    _refuse(
        isinstance(trainer.val_check_interval, int) or trainer.val_check_interval != 1.0,
        f"trainer.val_check_interval is {trainer.val_check_interval}: it counts physical batches, whose number is "
        "random. Remove it; trainer.check_val_every_n_epoch counts epochs.",
    )


def _check_compiled(module: pl.LightningModule) -> None:
    for name, part in module.named_modules():
        if is_compiled(part) or (part is module and was_compiled(module)):
            which = f"Module '{name}'" if name else type(module).__name__
            raise ModelError(
                f"{which} is compiled: compiled code does not show which functions use its parameters, so "
                "per-example gradients cannot be taken. Train the module without torch.compile."
            )


def _check_backward(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    owners: tuple[tuple[Any, type], ...] = (
        (module, pl.LightningModule),
        (trainer.precision_plugin, Precision),
        (trainer.strategy, Strategy),
    )
    for owner, base in owners:
        _refuse(
            getattr(owner.backward, "__func__", None) is not base.__dict__["backward"],
            f"{type(owner).__name__} has a backward of its own: the gradient of each example would not be that of its "
            "loss. Remove it; what it does to the loss belongs in training_step.",
        )


def _check_callbacks(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS:
            _refuse(
                isinstance(callback, kind),
                f"trainer.callbacks has {type(callback).__name__}: {reason}. Remove it.",
            )


def check_monitors(trainer: pl.Trainer, unprotected: set[str]) -> None:
    """Refuse to choose checkpoints, learning rates or the end of the run by numbers computed from raw examples.

    Args:
        unprotected: names of the values that were logged while training.
    """
    for name, monitor, _ in _monitors(trainer):
        # Lightning adds these to the name of a value that is logged by step and by epoch.
        logged = str(monitor).removesuffix("_step").removesuffix("_epoch")
        raw = monitor is not None and (
            bool({monitor, logged} & unprotected) or str(monitor).startswith(("train", "unprotected"))
        )
        _refuse(
            raw,
            f"{name}.monitor is '{monitor}': choosing by a number computed from raw training examples lies outside the "
            "guarantee. Monitor a validation metric, such as val/accuracy.",
        )


def check_validation(trainer: pl.Trainer) -> None:
    """Refuse to wait for a metric of a validation that never runs; Lightning finds it out after the first epoch.

    Args:
        trainer: whose loaders are known.
    """
    known = trainer.val_dataloaders is not None
    if not trainer.enable_validation or (known and not sum(trainer.num_val_batches)):
        for name, monitor, is_needed in _monitors(trainer):
            _refuse(
                is_needed and str(monitor).startswith("val"),
                f"{name}.monitor is '{monitor}', and this run has no validation. Hold out images by "
                "data.init_args.val_fraction, give the fit validation data of your own, or remove the monitor.",
            )


def _monitors(trainer: pl.Trainer) -> list[tuple[str, str | None, bool]]:
    """What waits for a number: its class, the name of the number, and whether it does not go on without."""
    monitors = [
        (type(callback).__name__, callback.monitor, bool(getattr(callback, "strict", True)))
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, standard.ModelCheckpoint | standard.EarlyStopping)
    ]
    plateaus = [
        (type(config.scheduler).__name__, config.monitor, config.strict) for config in trainer.lr_scheduler_configs
    ]
    return monitors + plateaus


def check_optimizers(trainer: pl.Trainer, trained: Iterable[Tensor]) -> None:
    """Refuse several optimizers, closures that run more than once, and parameters that are not the module's.

    Numbers that are not finite, learning rates that cannot be meant, and schedules that count physical batches are
    refused too.

    Args:
        trained: the parameters whose gradients are privatized.
    """
    check_monitors(trainer, set())
    _refuse(
        len(trainer.optimizers) != 1,
        f"configure_optimizers returns {len(trainer.optimizers)} optimizers; private training needs exactly one.",
    )
    for config in trainer.lr_scheduler_configs:
        _refuse(
            config.interval == "step" and config.frequency != 1,
            f"The learning rate schedule has interval: step and frequency: {config.frequency}, which Lightning counts "
            "in physical batches, whose number depends on the draw. Set frequency: 1, and count steps in the schedule.",
        )
    optimizer: Any = trainer.optimizers[0]
    _refuse(
        isinstance(optimizer, optim.LBFGS),
        "optimizer LBFGS reads the gradient several times per step. Use SGD, Adam or AdamW.",
    )
    for group in optimizer.param_groups:
        for name, value in group.items():
            for number in value if isinstance(value, list | tuple) and name != "params" else [value]:
                is_number = isinstance(number, int | float) or (isinstance(number, Tensor) and number.numel() == 1)
                _refuse(
                    is_number and not math.isfinite(number),
                    f"{name} of {type(optimizer).__name__} is {number}; the optimizer's settings are finite numbers.",
                )
        _refuse(
            not 0 <= float(group.get("lr", 0)) <= _LARGEST_LR,
            f"lr of {type(optimizer).__name__} is {group.get('lr')}; choose from 0 to {_LARGEST_LR:g}.",
        )
    ids = {id(parameter) for parameter in trained}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _refuse(
                parameter.requires_grad and id(parameter) not in ids,
                "The optimizer holds a parameter that is not among the module's trained parameters, so no private "
                "gradient exists for it. Build the optimizer from self.parameters().",
            )


def started_processes() -> int | None:
    """How many processes torchrun or srun has started; None where neither did."""
    if TorchElasticEnvironment.detect():
        return int(os.environ["WORLD_SIZE"])
    if SLURMEnvironment.detect():
        return int(os.environ["SLURM_NTASKS"])
    return None


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigurationError(message)
