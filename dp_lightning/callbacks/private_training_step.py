"""Stands in the place of a module's ``training_step`` during a private fit.

Lightning calls it with a physical batch and gets a loss of zero, so that an optimizer's closure sees no raw number. The
module's own ``training_step`` runs inside of ``PrivateStep``, on a batch of one example, with the number of the logical
step in its epoch as ``batch_idx``: how many physical batches there are depends on the draw.
``on_before_batch_transfer`` runs on one example after collation, ``on_after_batch_transfer`` inside of the step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from dp_lightning.callbacks.observed import Observer
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.reading import ExampleBatch
from dp_lightning.privacy.sampling import epoch_start
from dp_lightning.privacy.step import PrivateStep

_REPLACED = ("training_step", "_call_batch_hook")
# Attributes that Lightning keeps in a module, and those that stand in front of its methods during a step.
_KEPT = frozenset(vars(pl.LightningModule())) - set(vars(nn.Module()))
_OF_LIGHTNING = _KEPT | {"trainer", "log", "log_dict", *_REPLACED}


class PrivateTrainingStep:
    """Between Lightning and the private step.

    Args:
        trainer: about to fit.
        module: whose training step becomes private.

    Raises:
        ConfigurationError: for hooks that a private step cannot keep.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._module, self._step = module, module.training_step
        self._call_hook = module._call_batch_hook
        self._convert = trainer.precision_plugin.convert_input
        self._owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
        self._observer = Observer(module)
        self._takes_index = is_param_in_hook_signature(self._step, "batch_idx", min_args=2)
        self._index = 0
        if is_param_in_hook_signature(self._step, "dataloader_iter", explicit=True):
            raise ConfigurationError(
                "training_step takes dataloader_iter, and private training has to give it one example at a time. Give "
                "it the arguments batch and batch_idx."
            )
        if self._overrides("transfer_batch_to_device"):
            raise ConfigurationError(
                "transfer_batch_to_device is overridden: it would see several examples at once. Move its work to "
                "on_after_batch_transfer, which runs on one example inside of the step."
            )

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """What is applied to the batch of one example after collation."""
        if not self._overrides("on_before_batch_transfer"):
            return None
        return lambda batch: self._call_hook("on_before_batch_transfer", batch, 0)

    @property
    def has_transfer_hooks(self) -> bool:
        """Whether the user's hooks see examples before ``training_step`` does."""
        return any(self._overrides(f"on_{time}_batch_transfer") for time in ("before", "after"))

    def take_place(self, private: PrivateStep) -> None:
        """Stand in front of the module's own methods until ``close``."""
        plan = private.plan

        def training_step(batch: ExampleBatch, batch_idx: int) -> Tensor:
            step = batch.place.step
            start = epoch_start(step, num_train=plan.num_train, expected_batch_size=plan.expected_batch_size)
            self._index = step - start
            with self._observer.step(batch.counted):
                private.accumulate(batch)
            return torch.zeros((), device=self._module.device, requires_grad=True)

        def call_batch_hook(name: str, batch: Any, *args: Any) -> Any:
            if not isinstance(batch, ExampleBatch):
                return self._call_hook(name, batch, *args)
            return batch.to(args[0]) if name == "transfer_batch_to_device" else batch

        self._module.__dict__.update(training_step=training_step, _call_batch_hook=call_batch_hook)

    def close(self) -> None:
        """Give the module its own methods back."""
        for name in _REPLACED:
            self._module.__dict__.pop(name, None)

    def loss(self, batch: Any) -> Any:
        """The loss of the module's ``training_step`` on a batch of one example."""
        self._observer.begin_example()
        return self._loss(self._step, batch)

    def loss_of(self, module: pl.LightningModule, batch: Any) -> Any:
        """That of a copy of the module, on a batch of any size."""
        return self._loss(type(module).training_step.__get__(module), batch)

    def _loss(self, training_step: Callable[..., Any], batch: Any) -> Any:
        batch = self._convert(batch)
        if self._overrides("on_after_batch_transfer"):
            batch = self._call_hook("on_after_batch_transfer", batch, 0)
        output = training_step(batch, self._index) if self._takes_index else training_step(batch)
        return output.get("loss") if isinstance(output, Mapping) else output

    def is_no_state(self, owner: object, name: str) -> bool:
        """Whether an attribute belongs to Lightning, or to a metric, which sees all examples by itself."""
        if isinstance(owner, Metric | MetricCollection | Observer):
            return True
        if isinstance(owner, pl.LightningModule) and name in _OF_LIGHTNING:
            return True
        return isinstance(getattr(owner, "__dict__", {}).get(name), pl.Trainer)

    def _overrides(self, hook: str) -> bool:
        return any(is_overridden(hook, owner) for owner in self._owners)
