"""Logged numbers of raw training examples go to loggers and the progress bar, and to no other code.

Lightning shows what is logged to every hook, callback and schedule: ``trainer.callback_metrics``, ``logged_metrics``
and ``progress_bar_metrics``. A learning rate that depends on a training loss is not a function of the releases. During
a private fit, until its last hook has run, objects that refuse every use stand in the place of these numbers. A
progress bar reads the numbers themselves, while its ``get_metrics`` runs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.lightning_internals import (
    LoggerConnector,
    logger_connector,
    set_logger_connector,
    training_is_logged,
)
from dp_lightning.private_run.unprotected import POST_PROCESSING
from dp_lightning.refusing import refuse_every_use
from dp_lightning.torch_internals import tree_leaves

# Where a trainer has the numbers.
_SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class Withheld:
    """Takes the place of a logged number. Its text has the name, not the number.

    Args:
        name: under which it was logged.
        value: the number.
    """

    __slots__ = ("_name", "_value")

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            f"Code uses the logged value '{self._name}' during the fit, which is computed from raw training examples: "
            "what depends on it would not be a function of the releases. Loggers get it, and the progress bar by "
            "self.log(..., prog_bar=True). Monitor a validation metric, or read it after the fit."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy.copy and inspection ask
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()

    def __repr__(self) -> str:
        return f"<{self._name}: of raw training examples>"

    def __deepcopy__(self, memo: Any) -> "Withheld":
        return self


refuse_every_use(Withheld, Withheld._refuse)


class _Shown(dict[str, Any]):
    """What a trainer shows of the logged numbers. What is put there by hand is withheld; a copy is a plain dictionary.

    Args:
        kept: where the trainer has them.
        is_public: of a name and a value that are put there by hand, such as a learning rate.
    """

    def __init__(self, kept: dict[str, Any], is_public: Callable[[str, Any], bool]) -> None:
        super().__init__(kept)
        self._kept, self._is_public = kept, is_public

    def __setitem__(self, name: str, value: Any) -> None:
        self._kept[name] = value if self._is_public(name, value) else Withheld(name, value)
        super().__setitem__(name, self._kept[name])

    def update(self, *others: Any, **more: Any) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value

    def __ior__(self, other: Any) -> "_Shown":  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class WithholdingConnector(LoggerConnector):
    """Stands in the place of a trainer's connector to its loggers, and shares its state.

    Attributes:
        withholds: from the start of a private fit to that of the trainer's next run.
    """

    def __init__(self, connector: Any) -> None:
        self.__dict__ = connector.__dict__
        self.withholds = True

    def reset_metrics(self) -> None:
        self.withholds = self.withholds and self.trainer.sanity_checking  # else another run begins
        super().reset_metrics()

    @property
    def _is_open(self) -> bool:
        """A trainer has no stage once the last hook of the fit has run."""
        return not self.withholds or self.trainer.state.stage is None

    @property
    def metrics(self) -> Any:
        if not self._is_open and training_is_logged(self.trainer):
            return {kind: _withheld(values) for kind, values in self.metrics_of_training.items()}
        return super().metrics

    @property
    def callback_metrics(self) -> Any:
        return self._shown(super().callback_metrics, _given_back)

    @property
    def logged_metrics(self) -> Any:
        return self._shown(super().logged_metrics, _given_back)

    @property
    def progress_bar_metrics(self) -> Any:
        return self._shown(super().progress_bar_metrics, _shown_in_bar)

    def _shown(self, kept: dict[str, Any], given_back: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        if not self._is_open:
            return _Shown(kept, self._is_setting)
        kept.update(given_back(kept))
        return kept

    def _is_setting(self, name: str, value: Any) -> bool:
        """Whether a LearningRateMonitor shows a number of the optimizer's under its own name."""
        if isinstance(value, Withheld):
            return True
        if not isinstance(value, float | int | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            return False
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, LearningRateMonitor)]
        shown = ({*m.lrs, *m.last_momentum_values, *m.last_weight_decay_values} for m in monitors)
        if not any(name in names for names in shown):
            return False
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        settings = [setting for group in groups for setting in group.values() if isinstance(setting, float | int)]
        return np.float32(float(value)) in np.array(settings, np.float32)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(_given_back(metrics), step)
        _, logged, _ = self.kept
        logged.update({name: metrics[name] for name in metrics.keys() & logged.keys()})


class _OpenTrainer:
    """What a progress bar gets as its trainer while it asks for what to show: the numbers can be read."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if name not in _SHOWN:
            return value
        return _shown_in_bar(value) if name == "progress_bar_metrics" else _given_back(value)


class _GetMetrics:
    """Stands in front of a progress bar's ``get_metrics``.

    Args:
        before: what the progress bar has had as an attribute of its own.
    """

    def __init__(self, progress_bar: ProgressBar, before: dict[str, Any]) -> None:
        self._get, self.before = progress_bar.get_metrics, before

    def __call__(self, trainer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _given_back(self._get(_OpenTrainer(trainer), *args, **kwargs))  # type: ignore[arg-type]


def withhold(trainer: pl.Trainer) -> None:
    """Withhold what is logged while training from hooks, callbacks and schedules, until the fit is over."""
    if not isinstance(connector := logger_connector(trainer), WithholdingConnector):
        set_logger_connector(trainer, WithholdingConnector(connector))
    else:
        connector.withholds = True
    for progress_bar, own in _progress_bars(trainer):
        if not isinstance(own.get("get_metrics"), _GetMetrics):
            before = {name: own[name] for name in ("get_metrics",) if name in own}
            own["get_metrics"] = _GetMetrics(progress_bar, before)


def give_back(trainer: pl.Trainer) -> None:
    """Let progress bars be as they were. The numbers can be read once the last hook has run."""
    for _, own in _progress_bars(trainer):
        if isinstance(own.get("get_metrics"), _GetMetrics):
            own.update(own.pop("get_metrics").before)


def public_numbers(trainer: pl.Trainer) -> dict[str, float]:
    """What evaluations have logged, by name: numbers that no raw training example has a part in."""
    shown = {name: value for name, value in trainer.callback_metrics.items() if not isinstance(value, Withheld)}
    return {name: float(value) for name, value in shown.items() if not name.startswith("unprotected/")}


def _progress_bars(trainer: pl.Trainer) -> Iterator[tuple[ProgressBar, dict[str, Any]]]:
    """Each with its attributes."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return ((callback, vars(callback)) for callback in callbacks if isinstance(callback, ProgressBar))


def _withheld(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in POST_PROCESSING else Withheld(name, value) for name, value in values.items()}


def _given_back(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value._value if isinstance(value, Withheld) else value for name, value in values.items()}


def _shown_in_bar(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, which stay on their device until a progress bar asks for them."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in _given_back(values).items()
    }
