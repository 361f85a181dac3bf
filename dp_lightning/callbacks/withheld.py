"""Logged numbers of raw training examples go to loggers and the progress bar, and to nothing that could follow them.

Lightning shows what is logged to every hook, callback and schedule: ``trainer.callback_metrics``, ``logged_metrics``
and ``progress_bar_metrics``. A learning rate that follows a training loss is no function of the releases. During a
private fit, objects that refuse every use stand in the place of these numbers. Those of the progress bar have a text.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector

from dp_lightning.callbacks.unprotected import POST_PROCESSING
from dp_lightning.errors import ModelError


class Withheld:
    """Stands for a logged number.

    Args:
        name: under which it was logged.
        value: the number.
        has_text: whether it may be shown.
    """

    __slots__ = ("_has_text", "_name", "_value")

    def __init__(self, name: str, value: Any, *, has_text: bool) -> None:
        self._name, self._value, self._has_text = name, value, has_text

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            f"Code uses the logged value '{self._name}' during the fit, which is computed from raw training examples: "
            "what follows it would not be a function of the releases. Loggers and the progress bar get it. Monitor a "
            "validation metric, or read it after the fit."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copy.copy and inspection ask
            raise AttributeError(name)
        self._refuse()

    def __str__(self) -> str:
        return f"{self._value:.3g}" if self._has_text else f"<{self._name}: of raw training examples>"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return format(self._value, spec) if self._has_text else self._refuse()

    def __deepcopy__(self, memo: Any) -> "Withheld":
        return self

    __float__ = __int__ = __index__ = __complex__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __array__ = __reduce_ex__ = __hash__ = __round__ = __abs__ = __neg__ = _refuse  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse


class WithholdingConnector(_LoggerConnector):
    """Stands in the place of a trainer's connector to its loggers, and shares its state."""

    def __init__(self, connector: _LoggerConnector) -> None:
        self.__dict__ = connector.__dict__

    @property
    def metrics(self) -> Any:
        metrics: Any = super().metrics
        results = self.trainer._results
        if results is not None and results.training:
            return {kind: _withheld(values, has_text=kind == "pbar") for kind, values in metrics.items()}
        return metrics

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(_given_back(metrics), step)
        self._logged_metrics.update({name: metrics[name] for name in metrics.keys() & self._logged_metrics.keys()})


def withhold(trainer: pl.Trainer) -> None:
    """From here on, what is logged while training is withheld from hooks, callbacks and schedules."""
    if not isinstance(trainer._logger_connector, WithholdingConnector):
        trainer._logger_connector = WithholdingConnector(trainer._logger_connector)


def give_back(trainer: pl.Trainer) -> None:
    """The fit is over: the numbers can be read."""
    if isinstance(trainer._logger_connector, WithholdingConnector):
        plain = object.__new__(_LoggerConnector)
        plain.__dict__ = trainer._logger_connector.__dict__
        trainer._logger_connector = plain
        for values in (plain._callback_metrics, plain._logged_metrics, plain._progress_bar_metrics):
            values.update(_given_back(values))


def _withheld(values: Mapping[str, Any], *, has_text: bool) -> dict[str, Any]:
    return {
        name: value if name in POST_PROCESSING else Withheld(name, value, has_text=has_text)
        for name, value in values.items()
    }


def _given_back(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value._value if isinstance(value, Withheld) else value for name, value in values.items()}
