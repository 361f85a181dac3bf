"""Replaces a module's ``training_step`` during a private fit.

Lightning gets a sealed object for each physical batch, so that the hooks around a step get no raw number, and a loss of
zero, so that an optimizer's closure sees none either. The module's own ``training_step`` runs inside of
``PrivateStep``, on a batch of one example, with the number of the logical step in its epoch as ``batch_idx``: how many
physical batches there are depends on the draw. The module's own ``optimizer_step`` gets the same number. So do its
hooks around a batch, which are called once for each logical batch. What runs in ``optimizer_step`` and
``lr_scheduler_step`` is all that may change the optimizer and, between two losses, the model.
``on_before_batch_transfer`` runs on one example after collation, ``on_after_batch_transfer`` inside of the step.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection, SumMetric

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.lightning_internals import CALL_BATCH_HOOK, state_defaults
from dp_lightning.privacy.isolation.reachable import by_class, reachable
from dp_lightning.privacy.reading import ExampleBatch
from dp_lightning.privacy.sampling import epoch_of
from dp_lightning.privacy.step import PrivateStep
from dp_lightning.private_run.optimizer_state import OptimizerState
from dp_lightning.private_run.public_trainer import PublicTrainer, only_public
from dp_lightning.private_run.step_logging import CALLS, Observer
from dp_lightning.torch_internals import CALLED

# Hooks of the module that Lightning calls for each physical batch: before one, and when it is over.
_STARTS = ("on_train_batch_start",)
_ENDS = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end")
_REPLACED = ("training_step", "optimizer_step", "lr_scheduler_step", CALL_BATCH_HOOK, *_STARTS, *_ENDS)
# Attributes that libraries keep in their objects, and those that stand in front of methods during a step. A loss leaves
# them as they are; they are not followed.
_KEPT: tuple[tuple[type, set[str]], ...] = (
    (
        pl.LightningModule,
        {*vars(pl.LightningModule()), "trainer", "log", "log_dict", *_REPLACED}
        - {*vars(nn.Module()), "_example_input_array"},
    ),
    (Metric, {*vars(SumMetric()), *CALLS} - set(vars(nn.Module()))),
    (MetricCollection, {*vars(MetricCollection([])), *CALLS} - set(vars(nn.Module()))),
    (Optimizer, {CALLED}),  # set before the closure runs
)
_TRAINERS: tuple[type, ...] = (pl.Trainer, PublicTrainer)
_DATA: tuple[type, ...] = (Dataset, DataLoader)


@dataclass(frozen=True, eq=False)
class SealedBatch:
    """What hooks get of a physical batch: nothing.

    Attributes:
        one: from which Lightning takes the weight of what hooks log, the same for each physical batch.
    """

    one: Tensor = field(default_factory=lambda: torch.zeros(1))

    def _refuse(self, *args: Any) -> NoReturn:
        raise ModelError(
            "A hook uses the batch that it is given, which has the raw examples of a physical batch. In a private fit "
            "only training_step and the batch transfer hooks see examples, one at a time. Move it there, and take "
            "numbers of the batch out by self.log."
        )

    # Without __iter__, by which Lightning would look for a batch size, Python iterates by __getitem__.
    __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class _Outputs(dict[str, Any]):
    """What ``on_train_batch_end`` gets of what ``training_step`` returned."""

    def __missing__(self, name: str) -> NoReturn:
        raise ModelError(
            f"A hook uses '{name}' of what training_step returned, which is of raw examples. In a private fit its "
            "outputs have a loss of zero and nothing else. Log numbers in training_step by self.log."
        )


class _SealedResult(ClosureResult):
    """From which Lightning makes the outputs."""

    def asdict(self) -> dict[str, Any]:
        return _Outputs(super().asdict())


class PrivateTrainingStep:
    """Between Lightning and the private step.

    Args:
        trainer: about to fit.
        module: whose training step becomes private.

    Raises:
        ConfigurationError: for hooks that a private step cannot keep.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._module, self._step = trainer, module, module.training_step
        self._call_hook = getattr(module, CALL_BATCH_HOOK)
        self._convert = trainer.precision_plugin.convert_input
        self._owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
        self._own = {name: module.__dict__[name] for name in _REPLACED if name in module.__dict__}
        self._observer = Observer(module)
        # The user's own may set rates, and is called with the last physical batch.
        self._optimizer_step, self._schedule_step = module.optimizer_step, module.lr_scheduler_step
        self._sets_rates = is_overridden("optimizer_step", module)
        self._takes_index = is_param_in_hook_signature(self._step, "batch_idx", min_args=2)
        self._index = 0
        self._batch: ExampleBatch | None = None
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

    def require_no_trainer(self) -> None:
        """Refuse a trainer that the step reaches past the module's own attributes.

        Raises:
            ConfigurationError: with its place.
        """
        roots = {"self": self._module, "training_step": self._step, **self.also}
        for name, root in roots.items():
            for path, value in reachable(root, is_no_state, name):
                if isinstance(value, pl.Trainer):
                    raise ConfigurationError(
                        f"{path} is the trainer: by it training_step would read numbers that depend on the draw, or "
                        "keep something of an example. Use self.trainer, where public numbers can be read."
                    )

    @property
    def batch(self) -> ExampleBatch:
        """The physical batch that Lightning has now."""
        assert self._batch is not None
        return self._batch

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """What is applied to the batch of one example after collation."""
        return self._hook("before")

    @property
    def also(self) -> dict[str, object]:
        """What runs in the step beside the module: a data module that has ``on_after_batch_transfer``."""
        owners = [owner for owner in self._owners[1:] if is_overridden("on_after_batch_transfer", owner)]
        return {"datamodule": owners[0]} if owners else {}

    @property
    def has_transfer_hooks(self) -> bool:
        """Whether the user's hooks see examples before ``training_step`` does."""
        return self._hook("before") is not None or self._hook("after") is not None

    def data_sets(self) -> list[Any]:
        """What data modules that the step reaches hold of data sets and loaders, in attributes that are no state."""
        found: list[Any] = []

        def noted(owner: object, name: str) -> bool:
            if _is_data(owner, value := getattr(owner, "__dict__", {}).get(name)):
                found.append(value)
            return is_no_state(owner, name)

        for root in (self._module, self._step, *self.also.values()):
            for _ in reachable(root, noted):
                pass
        return found

    def metric_states(self) -> list[Any]:
        """What metrics of the module gather from examples, and no constant."""
        found = [value for _, value in reachable(self._module, is_no_state) if isinstance(value, Metric)]
        return [getattr(metric, name) for metric in found for name in state_defaults(metric)]

    def take_place(self, private: PrivateStep) -> None:
        """Replace the module's own methods until ``close``."""
        plan, state = private.plan, OptimizerState(self._trainer.optimizers[0], private.later)

        def training_step(batch: SealedBatch, batch_idx: int) -> Tensor:
            examples = self.batch
            if not examples.place.last or not self._sets_rates:
                state.require_same_settings()
            owners = (part for owner in self._owners for part in _parts(owner))
            with self._observer.step(examples.counted), only_public(self._trainer, owners):
                private.accumulate(examples)
            return torch.zeros((), device=self._module.device, requires_grad=True)

        def call_batch_hook(name: str, batch: Any, *args: Any) -> Any:
            if not isinstance(batch, ExampleBatch | SealedBatch):
                return self._call_hook(name, batch, *args)
            if isinstance(batch, SealedBatch) or name != "transfer_batch_to_device":
                return batch
            self._batch = batch.to(args[0])
            step = batch.place.step
            _, start = epoch_of(step, num_train=plan.num_train, expected_batch_size=plan.expected_batch_size)
            self._index = step - start
            return SealedBatch()

        def optimizer_step(epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
            state.require_same()
            with self._observer.closed():
                self._optimizer_step(epoch, self._index, *args, **kwargs)
            private.stepped()
            state.note()

        def lr_scheduler_step(*args: Any, **kwargs: Any) -> None:
            state.require_same_settings()
            with self._observer.closed():
                self._schedule_step(*args, **kwargs)
            state.note_settings()

        hooks = {name: self._once(name) for name in (*_STARTS, *_ENDS) if is_overridden(name, self._module)}
        self._module.__dict__.update(hooks, training_step=training_step, **{CALL_BATCH_HOOK: call_batch_hook})
        self._module.__dict__.update(optimizer_step=optimizer_step, lr_scheduler_step=lr_scheduler_step)
        vars(self._trainer.fit_loop.epoch_loop.automatic_optimization).update(output_result_cls=_SealedResult)

    def close(self) -> None:
        """Restore the module's own methods."""
        for name in _REPLACED:
            self._module.__dict__.pop(name, None)
        self._module.__dict__.update(self._own)
        vars(self._trainer.fit_loop.epoch_loop.automatic_optimization).pop("output_result_cls", None)

    def loss(self, batch: Any) -> Any:
        """The loss of the module's ``training_step`` on a batch of one example."""
        self._observer.begin_example()
        return self._loss(self._step, batch)

    def loss_of(self, module: pl.LightningModule, batch: Any) -> Any:
        """That of a copy of the module, on a batch of any size."""
        return self._loss(type(module).training_step.__get__(module), batch)

    def _loss(self, training_step: Callable[..., Any], batch: Any) -> Any:
        batch = self._convert(batch)
        if (hook := self._hook("after")) is not None:
            batch = hook(batch)
        output = training_step(batch, self._index) if self._takes_index else training_step(batch)
        return output.get("loss") if isinstance(output, Mapping) else output

    def _once(self, name: str) -> Callable[..., Any]:
        """The module's own hook, once for a logical batch and with its index."""
        hook, numbered = getattr(self._module, name), name.endswith(("batch_start", "batch_end"))

        def once(*args: Any, **kwargs: Any) -> Any:
            place = self.batch.place
            if place.piece != 0 if name in _STARTS else not place.last:
                return None
            return hook(*args[:-1], self._index, **kwargs) if numbered else hook(*args, **kwargs)

        return once

    def _overrides(self, hook: str) -> bool:
        return any(is_overridden(hook, owner) for owner in self._owners)

    def _hook(self, time: Literal["before", "after"]) -> Callable[[Any], Any] | None:
        """The user's ``on_<time>_batch_transfer``: that of the data module, where both have one."""
        name = f"on_{time}_batch_transfer"
        owner = next((owner for owner in reversed(self._owners) if is_overridden(name, owner)), None)
        return None if owner is None else lambda batch: getattr(owner, name)(batch, 0)


def is_no_state(owner: Any, name: str) -> bool:
    """Whether an attribute is Lightning's own, data, or torchmetrics', which is called after the step."""
    known = _owned_by(owner.__class__ if issubclass(type(owner), weakref.ProxyTypes) else type(owner))
    if known.whole or name in known.names or (known.only is not None and name != known.only):
        return True
    if known.gathers and name in state_defaults(owner):
        return True
    return known.values != () and isinstance(getattr(owner, "__dict__", {}).get(name), known.values)


def names_of_libraries(owner: Any) -> Set[str]:
    """What libraries keep in an object, and change between two losses; a loss changes none of it."""
    known = _owned_by(type(owner))
    return known.names | state_defaults(owner).keys() if known.gathers else known.names


class _Owned(NamedTuple):
    """What is no state in the objects of a class.

    Attributes:
        whole: whether all attributes are none.
        only: the one attribute that is state, where all others are none.
        names: attributes by name.
        values: attributes whose values have these classes.
        gathers: whether attributes are what a metric gathers.
    """

    whole: bool
    only: str | None
    names: frozenset[str]
    values: tuple[type, ...]
    gathers: bool


@by_class
def _owned_by(kind: type) -> _Owned:
    # Where the step exchanges the trainer, and in a callback, it is nothing to compare; nothing of it is followed.
    exchanged = issubclass(kind, nn.Module | pl.LightningDataModule | pl.Callback)
    return _Owned(
        whole=issubclass(kind, Observer | pl.Trainer | PublicTrainer),
        only="_step" if issubclass(kind, PrivateTrainingStep) else None,
        names=frozenset().union(*(names for base, names in _KEPT if issubclass(kind, base))),
        values=(*(_TRAINERS if exchanged else ()), *(_DATA if issubclass(kind, pl.LightningDataModule) else ())),
        gathers=issubclass(kind, Metric),
    )


def _is_data(owner: object, value: object) -> bool:
    """Whether it is a data set or a loader of a data module, which no loss can use."""
    return isinstance(owner, pl.LightningDataModule) and isinstance(value, _DATA)


def _parts(owner: object) -> Iterator[object]:
    return owner.modules() if isinstance(owner, nn.Module) else iter((owner,))
