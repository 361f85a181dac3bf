"""Nothing raw is written: what a checkpoint holds beside the model, the optimizer and what this package puts there.

A tensor there may be of raw examples, whatever code has put it there. A number may be one that was logged while
training. Both are refused by their place, before anything is on disk.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.mixins import HyperparametersMixin
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.statement import STATEMENT

# Tensors in these are the model's and the optimizer's.
_MODEL = {"state_dict", "optimizer_states", STATEMENT}
# Code of these cannot read what is withheld.
_TRUSTED = ("dp_lightning.", "lightning.")
# Largest denominator of a simple fraction. Of 50 losses one is taken for such.
_SIMPLE = 1000
# Where Lightning's own average of the weights is, beside the state dict.
_AVERAGE = {"current_model_state", "averaging_state"}


class LoggedNumbers:
    """The numbers that were logged while training, by their tags."""

    _MANY = 4096  # tensors are brought to the host together

    def __init__(self) -> None:
        self._waiting: dict[str, list[Tensor]] = defaultdict(list)
        self._known: dict[str, NDArray[np.float32]] = {}

    def note(self, tag: str, value: Tensor) -> None:
        """One number, without waiting for its device."""
        self._waiting[tag].append(value.detach().float().reshape(()).clone())
        if len(self._waiting[tag]) >= self._MANY:
            self._read()

    def tag_of(self, number: float) -> str | None:
        """Under which tag it was logged; None for a simple fraction, as an accuracy is, which many things are."""
        self._read()
        single = np.float32(number)
        if not np.isfinite(single) or np.float32(Fraction(number).limit_denominator(_SIMPLE)) == single:
            return None
        return next((tag for tag, numbers in self._known.items() if single in numbers), None)

    def _read(self) -> None:
        for tag, values in self._waiting.items():
            device = values[-1].device
            read = torch.stack([value.to(device) for value in values]).cpu().numpy()
            self._known[tag] = np.union1d(self._known.get(tag, read[:0]), read)
        self._waiting.clear()


def check_hyperparameters(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse tensors in saved hyperparameters, which go into every checkpoint and to the loggers.

    Raises:
        ConfigurationError: naming the hyperparameter.
    """
    for owner in (module, getattr(trainer, "datamodule", None)):
        if isinstance(owner, HyperparametersMixin):
            for place, value in _leaves(dict(owner.hparams), ()):
                if isinstance(value, Tensor | np.ndarray):
                    raise ConfigurationError(
                        f"The hyperparameter {_text(place)} of {type(owner).__name__} is an array: it goes into every "
                        "checkpoint and may be of raw examples. Leave it out, by "
                        f"save_hyperparameters(ignore=['{place[0]}']), and keep what the model needs in a buffer."
                    )


def check_metrics(module: pl.LightningModule) -> None:
    """Refuse metrics that put what they have gathered from examples into the model's state dict.

    Raises:
        ModelError: naming the metric.
    """
    for name, part in module.named_modules():
        if isinstance(part, Metric) and any(part._persistent.values()):
            raise ModelError(
                f"The metric {name} saves its state with the model, and it is of raw examples. Call "
                "metric.persistent(False)."
            )


def require_nothing_raw(checkpoint: Mapping[str, Any], trainer: pl.Trainer, logged: LoggedNumbers) -> None:
    """Refuse a checkpoint that holds an array or a logged number where neither belongs.

    Args:
        checkpoint: as it is about to be written.
        logged: the numbers of the fit.

    Raises:
        ModelError: naming the place.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = any(isinstance(callback, WeightAveraging) for callback in callbacks)
    trusted = {callback.state_key for callback in callbacks if type(callback).__module__.startswith(_TRUSTED)}
    known = trainer.lightning_module.state_dict().keys()
    if foreign := sorted(checkpoint.get("state_dict", {}).keys() - known):
        raise _refusal(f"a tensor in state_dict that is not the model's: {foreign[0]}")
    for name, part in checkpoint.items():
        if name in _MODEL or (averaging and name in _AVERAGE):
            continue
        if name == "callbacks":
            part = {key: state for key, state in part.items() if key not in trusted}
        for place, value in _leaves(part, (name,)):
            if isinstance(value, Tensor | np.ndarray) and np.prod(value.shape) != 1:
                raise _refusal(f"an array at {_text(place)}")
            number = isinstance(value, float | Tensor | np.ndarray | np.floating)
            if number and (tag := logged.tag_of(float(value))) is not None:
                raise _refusal(f"the number at {_text(place)}, which was logged as '{tag}'")


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"The checkpoint would hold {what}. It may be computed from raw training examples, and whoever gets the file "
        "would get it. Take it out of on_save_checkpoint or of the callback's state_dict; what the model needs belongs "
        "into a buffer of it."
    )


def _leaves(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*place, key))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            yield from _leaves(part, (*place, index))
    else:
        yield place, value


def _text(place: tuple[Any, ...]) -> str:
    return str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])
