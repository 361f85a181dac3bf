"""Nothing raw is written: what a checkpoint holds beside the model, the optimizer and what this package puts there.

Hyperparameters are settings, and what callbacks and hooks add is small and plain: numbers, text, paths, and lists and
dictionaries of them. Tensors, arrays, bytes and other objects may hold raw examples, whatever code has put them there,
and so may thousands of numbers or a long text; objects cannot be read again without running code either. A number may
be one that was logged while training. All of these are refused before anything is on disk. What remains of callbacks
and hooks comes from the user's code, and the statement names it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import NoneType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.mixins import HyperparametersMixin
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.lightning_internals import saves_states
from dp_lightning.private_run.resume import PRIVATE_RUN
from dp_lightning.private_run.unprotected import LoggedNumbers
from dp_lightning.torch_internals import EXTRA_STATE, parts_of_schedule


class _Bounds(NamedTuple):
    """The most that a part of a checkpoint may hold."""

    values: int  # other than text
    characters: int


# All hyperparameters of one module. Settings are few and data are many: a weight for each of the 1,000 classes of
# ImageNet fits, and so do the names of the 21,841 of ImageNet-21k (501,000 characters).
_SETTINGS = _Bounds(values=2_000, characters=600_000)
# The state of one callback, or another entry. Scores of thousands of epochs fit.
_STATE = _Bounds(values=10_000, characters=100_000)
# Of these types, and not of subclasses, which may hold more.
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set, torch.Size)
_PLAIN = {bool, int, float, complex, str, NoneType, torch.dtype, torch.device}
# Tensors in these are the model's and the optimizer's.
_MODEL = {"state_dict", "optimizer_states", PRIVATE_RUN}
_HYPERPARAMETERS = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
# What Lightning itself writes beside the model, the callbacks and the schedules.
_LIGHTNING = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "loops",
    *(owner.CHECKPOINT_HYPER_PARAMS_NAME for owner in (pl.LightningModule, pl.LightningDataModule)),
    *(owner.CHECKPOINT_HYPER_PARAMS_TYPE for owner in (pl.LightningModule, pl.LightningDataModule)),
}
# Code of these cannot read what is withheld.
_TRUSTED = ("dp_lightning.", "lightning.")
# Where Lightning's own average of the weights is, beside the state dict.
_AVERAGE = {"current_model_state", "averaging_state"}

_Place = tuple[Any, ...]
_Leaves = list[tuple[_Place, Any]]
#: Saved hyperparameters by the entry of the checkpoint that they go into, each as its single values and their places.
Settings = dict[str, _Leaves]


class _NotPlainError(Exception):
    """What is not allowed, and where."""

    def __init__(self, what: str, place: _Place) -> None:
        super().__init__(what)
        self.what, self.place = what, place


def check_hyperparameters(trainer: pl.Trainer, module: pl.LightningModule) -> Settings:
    """Refuse saved hyperparameters that are no settings: they go into every checkpoint and to the loggers.

    Returns:
        The hyperparameters as they are now.

    Raises:
        ConfigurationError: naming the hyperparameter.
    """
    settings: Settings = {}
    for owner, entry in zip((module, getattr(trainer, "datamodule", None)), _HYPERPARAMETERS, strict=True):
        if isinstance(owner, HyperparametersMixin):
            try:
                settings[entry] = _plain_leaves(dict(owner.hparams), (), _SETTINGS)
                for place, value in settings[entry]:
                    if isinstance(value, Tensor):
                        raise _NotPlainError("an array", place)
            except _NotPlainError as error:
                raise ConfigurationError(
                    f"The hyperparameter {_text(error.place)} of {type(owner).__name__} holds {error.what}. It goes "
                    "into every checkpoint, which may hold only numbers, text, paths, and lists and dictionaries of "
                    "them: then it holds no examples, and is read without running code. Leave it out with "
                    f"save_hyperparameters(ignore=['{error.place[0]}']), or save a name for it. Put tensors that the "
                    "model needs into buffers."
                ) from None
    return settings


def check_metrics(module: pl.LightningModule) -> None:
    """Refuse metrics that put what they have gathered from examples into the model's state dict.

    Raises:
        ModelError: naming the metric.
    """
    for name, part in module.named_modules():
        if isinstance(part, Metric) and saves_states(part):
            raise ModelError(
                f"The metric {name} saves its state, which comes from raw examples, with the model. Call "
                "metric.persistent(False)."
            )


def require_nothing_raw(
    checkpoint: Mapping[str, Any], trainer: pl.Trainer, logged: LoggedNumbers, settings: Settings
) -> set[str]:
    """Refuse a checkpoint with more than plain values, or with a logged number, where neither belongs.

    Args:
        checkpoint: as it is about to be written.
        logged: the numbers of the fit.
        settings: the hyperparameters before the first step.

    Returns:
        What it holds by the user's code, in words for the statement: nobody knows from what it was computed.

    Raises:
        ModelError: naming the place.
    """
    known = trainer.lightning_module.state_dict().keys()
    if foreign := sorted(checkpoint.get("state_dict", {}).keys() - known):
        raise _refusal(f"a tensor in state_dict that is not the model's: {foreign[0]}")
    by_users = set()
    for place, part, words in _parts(checkpoint, trainer):
        entry = place[0]
        try:
            leaves = _plain_leaves(part, place, _SETTINGS if entry in _HYPERPARAMETERS else _STATE)
        except _NotPlainError as error:
            raise _refusal(f"{error.what} at {_text(error.place)}") from None
        for where, value in leaves:
            if isinstance(value, float | Tensor | np.floating) and (tag := logged.tag_of(float(value))) is not None:
                raise _refusal(f"the number at {_text(where)}, which was logged as '{tag}'")
        as_before = [(where[1:], value) for where, value in leaves] == settings.get(entry)
        if leaves and words is not None and not as_before:
            by_users.add(f"{words} in checkpoints")
    return by_users


def count_logical_steps(checkpoint: dict[str, Any], num_steps: int) -> None:
    """Replace the counters of physical batches, whose number follows the realized draws and is not protected.

    Args:
        checkpoint: as Lightning is about to save it; changed in place.
        num_steps: logical steps in the ledger.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loop.get("epoch_loop.automatic_optimization.optim_progress", {})
    for counter in (loop.get("epoch_loop.batch_progress"), progress.get("optimizer", {}).get("zero_grad")):
        for part in ("total", "current"):
            if counter is not None and part in counter:
                counter[part] = dict.fromkeys(counter[part], num_steps)


def cut_views(checkpoint: Mapping[str, Any]) -> None:
    """Let the model's tensors that are views stand for themselves: torch writes all of the memory that a view is of."""
    for part in ("state_dict", *_AVERAGE):
        tensors = checkpoint.get(part, {})
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.layout is torch.strided and _is_view_of_more(value):
                tensors[name] = value.clone()


def _is_view_of_more(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _parts(checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> Iterator[tuple[_Place, Any, str | None]]:
    """What is neither the model's nor ours: its place, its content, and in words whose it is unless Lightning's."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = any(isinstance(callback, WeightAveraging) for callback in callbacks)
    of_users = {callback.state_key: callback for callback in callbacks if not _is_of(_TRUSTED, callback)}
    trusted = {callback.state_key for callback in callbacks} - of_users.keys()
    schedules = dict(enumerate(config.scheduler for config in trainer.lr_scheduler_configs))
    for name, part in checkpoint.items():
        if name == "callbacks":
            for key, state in part.items():
                if key not in trusted:
                    yield (name, key), state, f"state of {type(of_users[key]).__name__ if key in of_users else key}"
        elif name == "lr_schedulers":
            for index, state in enumerate(part):
                schedule = schedules.get(index)
                words = f"state of {type(schedule).__name__}" if _is_users(schedule) else None
                yield (name, index), state, words
        elif name == "state_dict":
            for key, value in part.items():
                if not isinstance(value, Tensor) or key.endswith(EXTRA_STATE):
                    yield (name, key), value, f"entry '{key}'"
        elif name not in _MODEL and not (averaging and name in _AVERAGE):
            yield (name,), part, None if name in _LIGHTNING else f"entry '{name}'"


def _is_of(packages: tuple[str, ...], part: Any) -> bool:
    return type(part).__module__.startswith(packages)


def _is_users(schedule: Any) -> bool:
    """Whether a schedule's state is by the user's code, or holds such."""
    if not _is_of((*_TRUSTED, "torch."), schedule):
        return True
    # A plain function has no state.
    return any(_is_users(part) for part in parts_of_schedule(schedule) if getattr(part, "__dict__", None))


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"The checkpoint would hold {what}. It may be computed from raw training examples, and whoever gets the file "
        "would get it. Take it out of on_save_checkpoint or of the callback's state_dict, which may hold a few "
        "numbers, text, paths, and lists and dictionaries of them; what the model needs belongs in a buffer of it."
    )


def _plain_leaves(part: Any, place: _Place, bounds: _Bounds) -> _Leaves:
    """All single values and their places.

    Raises:
        _NotPlainError: at the first that is not plain, or where there are too many.
    """
    leaves = []
    values = characters = 0
    for where, value in _leaves(part, place):
        if isinstance(value, Tensor | np.ndarray):
            if not _is_one_number(value):
                raise _NotPlainError("an array", where)
        elif not (type(value) in _PLAIN or isinstance(value, PurePath) or _is_numpys(value)):
            raise _NotPlainError(f"an object of type {type(value).__name__}", where)
        if isinstance(value, str | PurePath):
            characters += len(str(value))
        else:
            values += 1
        if values > bounds.values:
            raise _NotPlainError(f"more than {bounds.values:,} values in all", place or where[:1])
        if characters > bounds.characters:
            raise _NotPlainError(f"more than {bounds.characters:,} characters of text in all", place or where[:1])
        leaves.append((where, value))
    return leaves


def _is_one_number(array: Tensor | NDArray[Any]) -> bool:
    """And no view of a larger array: torch writes all that a view is of."""
    if not isinstance(array, Tensor):
        return False
    whole = array.layout is torch.strided and not _is_view_of_more(array)
    return array.numel() == 1 and whole and not array.is_complex()


def _is_numpys(value: Any) -> bool:
    """Whether it is a number of NumPy."""
    return isinstance(value, np.number | np.bool_) and type(value).__module__ == "numpy"


def _leaves(value: Any, place: _Place) -> Iterator[tuple[_Place, Any]]:
    """What it is made of, as pickle would write it; keys are at the places of their values."""
    if type(value) in _MAPPINGS:
        for key, part in value.items():
            yield from _leaves(key, (*place, key))
            yield from _leaves(part, (*place, key))
    elif type(value) in _SEQUENCES:
        for index, part in enumerate(value):
            yield from _leaves(part, (*place, index))
    else:
        yield place, value
    if isinstance(value, OrderedDict | Tensor) and (attributes := getattr(value, "__dict__", None)):
        yield from _leaves(attributes, place)


def _text(place: _Place) -> str:
    return str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])
