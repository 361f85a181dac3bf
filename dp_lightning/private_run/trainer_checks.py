"""Settings of Trainer and module that a private run cannot have, refused together, each with what to change."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import callbacks as standard
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, optim

from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_internals import was_compiled
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO
from dp_lightning.torch_internals import is_compiled

_PRECISIONS = ("None", "32", "32-true", "64", "64-true", "bf16", "bf16-mixed")
_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (
        standard.GradientAccumulationScheduler,
        "it changes the batch size. Set privacy.expected_batch_size and privacy.max_physical_batch_size instead",
    ),
    (standard.StochasticWeightAveraging, "it passes over the data again. Average weights without the data instead"),
    (standard.LearningRateFinder, "it takes steps on private data that no ledger counts. Tune on public data"),
    (standard.BatchSizeFinder, "it takes steps on private data. Set privacy.max_physical_batch_size by hand"),
)

Row = tuple[bool, str]
"""Whether a setting is refused, and the message."""


#: What is wrong with a class for which ``is_of_the_other_package`` holds.
OF_THE_OTHER_PACKAGE = (
    "is of the package pytorch_lightning, and dp_lightning builds on the package lightning. Write import "
    "lightning.pytorch as pl instead, for Trainer, LightningModule, data module, callbacks and loggers."
)


def is_of_the_other_package(kind: type) -> bool:
    """Whether a class inherits from pytorch_lightning, which has the classes of lightning.pytorch a second time."""
    return any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in kind.__mro__)


def check_settings(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what cannot be trained privately; nothing of the data is touched.

    Raises:
        ConfigurationError: with a line for each setting.
    """
    if not isinstance(trainer, pl.Trainer):  # Lightning itself refuses a module of the other package
        raise ConfigurationError(f"The Trainer {OF_THE_OTHER_PACKAGE}")
    refuse(
        *_of_the_trainer(trainer),
        *_of_the_processes(trainer),
        *_of_the_callbacks(trainer),
        *_of_the_module(module),
    )


def refuse(*rows: Row) -> None:
    """Raise an error with a line for each setting that is refused."""
    if found := [message for cannot_be, message in rows if cannot_be]:
        head = f"{len(found)} settings cannot be in a private run:\n- " if found[1:] else ""
        raise ConfigurationError(head + "\n- ".join(found))


def _of_the_trainer(trainer: pl.Trainer) -> Iterator[Row]:
    settings: Any = trainer
    folders = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
    folders += [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    urls = [str(folder) for folder in folders if "://" in str(folder)]
    yield (
        bool(urls),
        f"A run would write to {', '.join(urls)}, a URL, and it writes into folders of this machine. Give "
        "trainer.default_root_dir, the loggers and ModelCheckpoint a path, such as runs, or mount what it names.",
    )
    yield (
        bool(trainer.gradient_clip_val),  # Lightning does nothing for 0
        f"trainer.gradient_clip_val is {trainer.gradient_clip_val}: it would clip the noised gradient. Remove it; "
        "per-example clipping is privacy.max_grad_norm.",
    )
    yield (
        trainer.accumulate_grad_batches != 1,
        f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}: it would change the batch size that is "
        "accounted for. Remove it; set privacy.expected_batch_size, and privacy.max_physical_batch_size for memory.",
    )
    yield (
        str(trainer.precision) not in _PRECISIONS,
        f"trainer.precision is {trainer.precision}: loss scaling or coarse noise would break the guarantee. Set it to "
        "32-true, bf16-mixed or 64-true.",
    )
    yield settings.overfit_batches != 0, "trainer.overfit_batches repeats the same batch. Remove it."
    yield (
        settings.reload_dataloaders_every_n_epochs != 0,
        "trainer.reload_dataloaders_every_n_epochs would replace the data set during the run. Remove it.",
    )


def _of_the_processes(trainer: pl.Trainer) -> Iterator[Row]:
    """Strategies, and what writes checkpoints."""
    strategy, writer = trainer.strategy, type(trainer.strategy.checkpoint_io)
    distributed = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    yield (
        not (distributed or isinstance(strategy, SingleDeviceStrategy)),
        f"trainer.strategy is {type(strategy).__name__}, which cuts the model or its optimizer into pieces. Set "
        "trainer.strategy: dp_ddp, or ddp.",
    )
    yield (
        distributed and type(strategy.launcher).__module__.endswith("multiprocessing"),
        "trainer.strategy starts its processes by fork or spawn: what they spend would be lost with them. Set "
        "trainer.strategy: ddp, and run a script rather than a notebook.",
    )
    yield (
        writer not in (TorchCheckpointIO, PrivateCheckpointIO),
        f"trainer.plugins has {writer.__name__}: its checkpoints would have no journal of steps beside them, so that "
        "no run could resume from them. Remove it.",
    )


def _of_the_callbacks(trainer: pl.Trainer) -> Iterator[Row]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    private = [callback for callback in callbacks if isinstance(callback, PrivacySettings)]
    yield len(private) > 1, "trainer.callbacks has several PrivacyCallbacks, and a run has one plan. Leave one."
    for callback in callbacks:
        name = type(callback).__name__
        yield is_of_the_other_package(type(callback)), f"The callback {name} {OF_THE_OTHER_PACKAGE}"
        for kind, reason in _CALLBACKS:
            yield isinstance(callback, kind), f"trainer.callbacks has {name}: {reason}. Remove it."


def _of_the_module(module: pl.LightningModule) -> Iterator[Row]:
    kind = type(module).__name__
    compiled = [name for name, part in module.named_modules() if is_compiled(part) or (not name and was_compiled(part))]
    yield (
        bool(compiled),
        f"{f'Module {compiled[0]!r}' if compiled and compiled[0] else kind} is compiled: compiled code does not show "
        "which functions use its parameters, so per-example gradients cannot be taken. Train the module without "
        "torch.compile.",
    )
    yield (
        not module.automatic_optimization,
        f"automatic_optimization of {kind} is False: the order of gradient, noise and step would be open. Use "
        "automatic optimization with one optimizer.",
    )
    yield (
        is_overridden("backward", module),
        f"{kind} has a backward of its own: the gradient of each example would not be that of its loss. Remove it; "
        "what it does to the loss belongs in training_step.",
    )


def check_optimizers(trainer: pl.Trainer, trained: Iterable[Tensor]) -> None:
    """Refuse several optimizers, closures that run more than once, and parameters that are not the module's.

    Args:
        trained: the parameters whose gradients are privatized.

    Raises:
        ConfigurationError: with a line for each.
    """
    ids = {id(parameter) for parameter in trained}
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    refuse(
        (
            len(trainer.optimizers) != 1,
            f"configure_optimizers returns {len(trainer.optimizers)} optimizers; private training needs exactly one.",
        ),
        (
            any(isinstance(optimizer, optim.LBFGS | optim.SparseAdam) for optimizer in trainer.optimizers),
            "optimizer LBFGS reads the gradient several times per step, and SparseAdam takes sparse gradients, which a "
            "privatized gradient is not. Use SGD, Adam or AdamW.",
        ),
        (
            any(each.requires_grad and id(each) not in ids for group in groups for each in group["params"]),
            "The optimizer holds a parameter that is not among the module's trained parameters, so no private gradient "
            "exists for it. Build the optimizer from self.parameters().",
        ),
    )
