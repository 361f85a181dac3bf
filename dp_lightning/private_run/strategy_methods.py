"""Four public methods of the trainer's strategy, by which a fit is private: for one device and for DDP.

``process_dataloader`` makes the user's training loader one of logical steps, ``batch_to_device`` lets their elements
pass, ``training_step`` adds up the physical batches of a step, and ``backward`` releases the privatized gradient. In
the order of Lightning: ``training_step``, ``zero_grad``, ``backward``, ``on_before_optimizer_step``, step.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.plan import steps_of_epoch
from dp_lightning.private_run.data_checks import checked_loader
from dp_lightning.private_run.logical_batches import LogicalBatch, LogicalLoader

_METHODS = ("process_dataloader", "batch_to_device", "training_step", "backward")
_BEFORE_TRANSFER = "on_before_batch_transfer"


class StrategyMethods:
    """Takes the place of the strategy's methods from ``install`` to ``remove``; both may be called again.

    Args:
        trainer: trainer that is about to fit.
        expected_batch_size: B.
        num_train: returns N of a training set.

    Attributes:
        loader: the user's training loader; None until Lightning has asked for it.
        take_step: is called with a logical batch, and adds up the gradients of its examples.
        release: puts the privatized gradient into ``.grad``.
    """

    def __init__(self, trainer: pl.Trainer, *, expected_batch_size: int, num_train: Callable[[Any], int]) -> None:
        self._trainer, self._strategy = trainer, trainer.strategy
        self._expected_batch_size, self._num_train = expected_batch_size, num_train
        self.loader: DataLoader[Any] | None = None
        self.take_step: Callable[[LogicalBatch], None]
        self.release: Callable[[], None]
        self._owners: list[Any] = []

    def install(self) -> None:
        """Take the place of the strategy's methods."""
        vars(self._strategy).update({name: getattr(self, name) for name in _METHODS})
        data = getattr(self._trainer, "datamodule", None)
        self._owners = [
            owner for owner in (self._trainer.lightning_module, data) if is_overridden(_BEFORE_TRANSFER, owner)
        ]
        for owner in self._owners:
            vars(owner)[_BEFORE_TRANSFER] = _passing_logical(getattr(owner, _BEFORE_TRANSFER))

    def remove(self) -> None:
        """Give the strategy its own methods back."""
        for name in _METHODS:
            vars(self._strategy).pop(name, None)
        for owner in self._owners:
            vars(owner).pop(_BEFORE_TRANSFER, None)
        self._owners = []

    def process_dataloader(self, loader: Any) -> Any:
        """A loader of logical steps for the training loader; any other loader as the strategy makes it.

        Raises:
            ConfigurationError: where there are several training loaders, or the loader's order cannot be replaced.
        """
        trainer = self._trainer  # which has a train_dataloader once all training loaders have come here
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training or trainer.train_dataloader is not None:
            return type(self._strategy).process_dataloader(self._strategy, loader)
        if self.loader is not None:
            raise ConfigurationError("There are several training loaders; private training needs exactly one.")
        self.loader = checked_loader(loader)
        return LogicalLoader(
            self.loader,
            steps_of_epoch(self._num_train(self.loader.dataset), self._expected_batch_size),
            position=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        )

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave a logical batch as it is; the strategy moves any other batch."""
        if isinstance(batch, LogicalBatch):
            return batch
        return type(self._strategy).batch_to_device(self._strategy, batch, *args, **kwargs)

    def training_step(self, batch: LogicalBatch, *args: Any) -> Tensor:
        """Add up the examples of a step; the zero is the loss that Lightning needs, and nothing is computed from it."""
        with self._trainer.precision_plugin.train_step_context():
            self.take_step(batch)
        return torch.zeros((), device=self._strategy.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Release the step, between the hooks of the strategy, of the callbacks and of the module."""
        strategy, precision, module = self._strategy, self._trainer.precision_plugin, self._trainer.lightning_module
        strategy.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        self.release()
        closure_loss = precision.post_backward(closure_loss, module)
        strategy.post_backward(closure_loss)
        return closure_loss


def _passing_logical(hook: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """The user's hook, which a logical batch passes by: each example goes through the hook when it is read."""
    return lambda batch, dataloader_idx: batch if isinstance(batch, LogicalBatch) else hook(batch, dataloader_idx)
