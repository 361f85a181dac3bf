"""What has trained weights before a run: private steps, which go on counting, and steps without privacy.

The ledger belongs to the weights. In this process every release is noted at the parameters that it is for, and every
step of an optimizer of torch that takes another gradient as a release, whoever drives it. A copy is known by its
numbers: those of private runs from the moments at which they ended or were saved, those of other training while the
trained parameters are alive. What another process has trained is known only where a statement came with the weights.
"""

import json
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from dp_lightning.errors import ConfigurationError, DataError, DpLightningError
from dp_lightning.privacy.accounting import Ledger, Run
from dp_lightning.privacy.statement import STATEMENT, PrivacyStatement
from dp_lightning.privacy.weights import fingerprint


@dataclass
class _Release:
    """A privatized gradient that an optimizer may step with, any number of times."""

    gradient: weakref.ref[Tensor]
    version: int | None = None  # of the gradient after the first step, until which post-processing may change it


@dataclass(frozen=True, eq=False)
class Training:
    """A private run, as what it has trained knows it.

    Attributes:
        run: its name.
        ledger: its steps, which may become more.
        unit: what one neighbour adds or removes, in words.
        reproducible: whether its noise follows from a seed that is written down.
        faults: what keeps it from release, in words; they may become more.
    """

    run: str
    ledger: Ledger
    unit: str
    reproducible: bool
    faults: Collection[str]

    @property
    def runs(self) -> dict[str, tuple[Run, ...]]:
        """Its steps and those before it, by the names of the runs."""
        return {**self.ledger.earlier, self.run: self.ledger.runs}


_waiting = WeakIdKeyDictionary()  # parameter: _Release
_private = WeakIdKeyDictionary()  # parameter: the trainings of it, by their runs
_copies: dict[str, Training] = {}  # by the fingerprint of a trained parameter
_ordinary = WeakIdKeyDictionary()  # parameters that a step without privacy has trained


@dataclass
class Origin:
    """What has trained the weights before a run.

    Attributes:
        words: each training.
        faults: what of it keeps the run from release.
    """

    words: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def origin_of(
    module: nn.Module, ledger: Ledger, *, run: str, unit: str, other_data: bool, file: str | None = None
) -> Origin:
    """Count the private steps behind a module's parameters and buffers in ``ledger``, and say what else is known.

    Args:
        ledger: of the run that begins.
        run: its name.
        unit: what one neighbour adds or removes, in words.
        other_data: whether someone has declared that all training before was on other people's data; its steps are
            then named and not counted.
        file: from which the weights were read.

    Raises:
        ConfigurationError: where a run before has another unit of privacy.
        DataError: where the file has a statement that cannot be read.
    """
    trainings, ordinary = _past_of(module)
    origin = Origin()
    if file is not None:
        if (known := training_behind(file)) is None:
            origin.words.append(f"weights of {file}: nobody knows on what they were trained")
        else:
            trainings.append(known)
    declared = ", on data that was declared to be other" if other_data else ", which count here"
    runs: dict[str, tuple[Run, ...]] = {}
    for training in trainings:
        if training.run == run:
            continue
        if not other_data:
            _require_same_unit(training, unit)
            origin.faults += [
                f"run {training.run}, which trained the weights before: {why}" for why in _faults(training)
            ]
        for name, steps in training.runs.items():
            if name != run and count_of(steps) > count_of(runs.get(name, ())):
                runs[name] = steps
    if not other_data:
        ledger.count_earlier(runs)
    origin.words += [f"run {name}: {count_of(steps)} private steps{declared}" for name, steps in runs.items()]
    if ordinary:
        text = f"steps without privacy on {', '.join(ordinary[:3])}{' and others' if len(ordinary) > 3 else ''}"
        origin.words.append(text + (declared if other_data else ""))
        if not other_data:
            origin.faults.append(f"the weights were trained before by {text}")
    return origin


def training_behind(file: str) -> Training | None:
    """The private run behind a file that `dpl export` has written; None where the file does not say.

    Raises:
        DataError: where what it says is no privacy statement.
    """
    if not file.endswith(".safetensors"):
        return None
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        said = (opened.metadata() or {}).get(STATEMENT)
    if said is None:
        return None
    try:
        claims = PrivacyStatement.from_saved(json.loads(said))
    except (ValueError, TypeError, KeyError, DpLightningError) as error:
        raise DataError(f"{file} has a privacy statement that cannot be read ({error}). Export it anew.") from error
    return Training(claims.run, claims.ledger, claims.unit_of_privacy, claims.reproducible, claims.faults)


def _require_same_unit(training: Training, unit: str) -> None:
    if training.unit != unit:
        raise ConfigurationError(
            f"The weights were trained before by run {training.run}, which protects {training.unit}. This run would "
            f"protect {unit}, and their steps cannot be added up. Set privacy.unit_of_privacy as that run has it, or "
            "privacy.earlier_training: other_data where it was on other people's data."
        )


def _faults(training: Training) -> list[str]:
    reasons = [*training.faults, *(["it is reproducible"] if training.reproducible else [])]
    return [f"run {training.run}, which trained the weights before: {reason}" for reason in reasons]


def count_of(runs: Iterable[Run]) -> int:
    """Steps in them."""
    return sum(count for _, _, count in runs)


def released(parameters: Iterable[Tensor], training: Training) -> None:
    """Their ``.grad`` is a release of this training."""
    for parameter in parameters:
        assert parameter.grad is not None
        _waiting[parameter] = _Release(weakref.ref(parameter.grad))
        _private.setdefault(parameter, {})[training.run] = training


def remember(parameters: Iterable[Tensor], training: Training, *, start: Collection[str]) -> None:
    """Copies of these parameters are known from here on.

    Args:
        start: the ``marks`` of the parameters when the run began. Those that no step has changed are not its own.
    """
    _copies.update((mark, training) for mark in marks(parameters) if mark not in start)


def _past_of(module: nn.Module) -> tuple[list[Training], list[str]]:
    """The private runs behind its tensors, and the names of those that were trained without privacy."""
    ordinary = set(marks(_ordinary.keys()))
    found: dict[int, Training] = {}
    without: list[str] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        mine = marks([tensor]) if _copies or ordinary else []
        trainings = [*_private.get(tensor, {}).values(), *(_copies[mark] for mark in mine if mark in _copies)]
        found |= {id(training): training for training in trainings}
        if tensor in _ordinary or ordinary.intersection(mine):
            without.append(name)
    return list(found.values()), without


def marks(tensors: Iterable[Tensor]) -> list[str]:
    """Fingerprints of those that can be told from others: not all of their numbers are the same."""
    found = []
    for tensor in tensors:
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
            flat = tensor.detach().reshape(-1)
            if flat.numel() and bool((flat != flat[0]).any()):
                found.append(fingerprint(tensor))
    return found


def _after_step(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
    for parameter in _trained(optimizer):
        release = _waiting.get(parameter)
        gradient = parameter.grad
        same = release is not None and release.gradient() is gradient
        if same and release.version in (None, gradient._version):
            release.version = gradient._version
        else:
            _ordinary[parameter] = True


def _trained(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


register_optimizer_step_post_hook(_after_step)
