"""What has trained weights before a run: private steps, which keep counting, and steps without privacy.

The ledger belongs to the weights. In this process every release is noted at the parameters that it is for, and every
step of an optimizer of torch that takes another gradient than a release, whoever drives it. From its start on, the
parameters of a private run are compared: only such steps on releases change them. A copy is recognised by its values:
those of private runs after each step, those of other training while the trained parameters are alive. Training in
another process is known only if a statement came with the weights.
"""

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from dp_lightning.errors import ConfigurationError, DataError, ModelError
from dp_lightning.privacy.accounting import Ledger, Run
from dp_lightning.privacy.exported import RANDOM_IMAGES, recipe_of, statement_of
from dp_lightning.privacy.isolation.contents import Contents
from dp_lightning.privacy.isolation.later import Later
from dp_lightning.privacy.weights import fingerprint
from dp_lightning.torch_internals import version_of

# Numbers of a tensor by which a copy is known, and tensors whose copies are known from each step; those of the others
# are known from the statements.
_NUMBERS, _TENSORS = 256, 8
# Fewer numbers than these may be equal by chance when they are rounded.
_MANY = 8


@dataclass
class _Release:
    """A privatized gradient that an optimizer may step with, any number of times."""

    gradient: weakref.ref[Tensor]
    hook: RemovableHandle  # called where a backward pass adds to the gradient before the first step
    version: int | None = None  # of the gradient after the first step, until which post-processing may change it


@dataclass(frozen=True, eq=False)
class Training:
    """A private run, as it is noted at the parameters that it has trained.

    Attributes:
        run: its name.
        ledger: its steps, which may become more.
        unit: what one neighbour adds or removes, in words.
        reproducible: whether its noise follows from a seed that is written down.
        faults: what keeps it from release, in words; they may become more.
        look: reads what a GPU has found out.
        before: what has trained the weights before it, in words; known once it has begun.
    """

    run: str
    ledger: Ledger
    unit: str
    reproducible: bool
    faults: Collection[str]
    look: Callable[[], None] = lambda: None
    before: Collection[str] = ()

    @property
    def runs(self) -> dict[str, tuple[Run, ...]]:
        """Its steps and those before it, by the names of the runs."""
        return {**self.ledger.earlier, self.run: self.ledger.runs}


_waiting = WeakIdKeyDictionary()  # parameter: _Release
_private = WeakIdKeyDictionary()  # parameter: the trainings of it, by their runs
_ordinary = WeakIdKeyDictionary()  # parameters that a step without privacy has trained
_followed = WeakIdKeyDictionary()  # parameter: the set of TrainedWeights with it
# For each optimizer that is in a step: the parameters with a gradient, and whether it was a release.
_stepping: "weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, bool]]]" = weakref.WeakKeyDictionary()


class TrainedWeights:
    """The trained parameters of a run, which only steps on releases change from here on.

    Args:
        parameters: by name.
        training: the run.
        later: where what a GPU finds out is given to be read.
    """

    def __init__(self, parameters: Mapping[str, Tensor], training: Training, later: Later) -> None:
        self._parameters, self._training, self._later = dict(parameters), training, later
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._devices = [parameter.device for parameter in parameters.values()]
        self._largest = sorted(parameters.values(), key=Tensor.numel, reverse=True)[:_TENSORS]
        self._start = frozenset(marks(parameters.values()))
        self._others = {id(other): other.ledger.num_steps for other in self._trainings()}
        self._touched: dict[str, None] = {}
        self._stepped: dict[str, None] = {}  # those of them that an optimizer has changed
        self._arrays = self._look()
        self._contents = Contents(self._arrays)
        self._arrays.clear()
        for parameter in parameters.values():
            _followed.setdefault(parameter, weakref.WeakSet()).add(self)

    def begin(self) -> None:
        """The losses of the next step are computed, and have gradients of their own."""
        for parameter in self._parameters.values():
            if (release := _waiting.get(parameter)) is not None:
                release.hook.remove()

    def hold(self) -> None:
        """From here on, compare with what the parameters hold now; copies of it are known."""
        self._arrays[:] = self._look()
        self._contents.hold()
        self._arrays.clear()
        self.remember(self._largest)

    def note(self) -> None:
        """Note what has changed by now."""
        self._compare(lambda: None)

    def _compare(self, then: Callable[[], None]) -> None:
        """Note what has changed, and call ``then``; for tensors of a GPU again when they are read."""
        self._arrays[:] = self._look()
        names = list(self._parameters)

        def unread(flags: Tensor, indices: list[int]) -> None:
            def tell(read: Tensor) -> None:
                found = [names[index] for index, differs in zip(indices, read.tolist(), strict=True) if differs]
                self._touched.update(dict.fromkeys(found))
                then()

            self._later.read(flags, tell)

        self._touched.update(dict.fromkeys(names[index] for index in self._contents.changed(unread)))
        self._arrays.clear()
        then()

    def note_step_without_privacy(self, parameter: Tensor) -> None:
        """An optimizer has stepped on another gradient than a release."""
        name = self._names[id(parameter)]
        self._touched[name] = self._stepped[name] = None

    def touched(self) -> list[str]:
        """Names of the parameters that other code than steps on releases has changed."""
        self.note()
        self._later.look()
        return list(self._touched)

    def require_untouched(self) -> None:
        """Refuse parameters that other code has changed; those of a GPU when what it finds out is read.

        Raises:
            ModelError: naming them.
        """
        self._compare(self._refuse_touched)

    def _refuse_touched(self) -> None:
        if names := list(self._stepped):
            raise ModelError(
                f"{', '.join(names[:5])} changed since the private run began, by an optimizer's step on another "
                "gradient than a release. Only what the steps release may change what is trained. Post-process a "
                "release in place: parameter.grad.mul_(2) or parameter.grad.copy_(other), not parameter.grad = other; "
                "no backward pass may add to it. Steps of other training belong before the run, as in configure_model."
            )
        if names := list(self._touched):
            raise ModelError(
                f"{', '.join(names[:5])} changed since the private run began, by other code than an optimizer's step "
                "on a release. Only what the steps release may change what is trained. Set weights before the run, "
                "as in __init__ or configure_model; during the run change them in optimizer_step after the optimizer, "
                "or in a hook of the optimizer (register_step_post_hook)."
            )

    def remember(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Copies of these tensors, which follow from the run's releases, are known; None is all that it trains.

        Those that no step has changed are not its own.
        """
        copies = _copies.setdefault(id(self._training), _Copies(self._training))
        for tensor in filter(_is_readable, self._parameters.values() if tensors is None else tensors):
            copies.add(tensor, self._start, self._later)

    def others(self) -> list[Training]:
        """Other private runs that have taken steps on these parameters since."""
        return [other for other in self._trainings() if other.ledger.num_steps > self._others.get(id(other), 0)]

    def _trainings(self) -> list[Training]:
        found = (training for p in self._parameters.values() for training in _private.get(p, {}).values())
        return list({id(training): training for training in found if training.run != self._training.run}.values())

    def _look(self) -> list[Tensor]:
        # After the run a model may be frozen and moved to another device.
        pairs = zip(self._parameters.values(), self._devices, strict=True)
        return [parameter.detach().to(device) for parameter, device in pairs]


class _Copies:
    """The marks of what a private run has trained, in a row, which take 0.2 KB for a step."""

    def __init__(self, training: Training) -> None:
        self.training, self._kept = training, bytearray()
        self._unread: dict[int, Callable[[], None]] = {}

    def add(self, tensor: Tensor, start: frozenset[bytes], later: Later) -> None:
        """Know copies of a tensor, but for those of the start."""
        size, numbers = tensor.numel(), _sample(tensor)
        key = next(_counter)

        def note(read: Tensor) -> None:
            if self._unread.pop(key, None) is not None:
                self._kept += b"".join(mark for mark in _marks_of(size, read) if mark not in start)

        self._unread[key] = lambda: note(numbers.cpu())
        later.read(numbers, note)

    def marks(self) -> NDArray[np.uint64]:
        """All of them, sorted."""
        for read in list(self._unread.values()):
            read()
        return np.unique(_numbers(self._kept))


_copies: dict[int, _Copies] = {}  # by the id of the training
_counter = itertools.count()


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
    module: nn.Module, ledger: Ledger, *, run: str, unit: str, other_data: bool, files: Iterable[str] = ()
) -> Origin:
    """Count the private steps behind a module's parameters and buffers in ``ledger``, and say what else is known.

    Args:
        ledger: of the run that begins.
        run: its name.
        unit: what one neighbour adds or removes, in words.
        other_data: whether someone has declared that all training before was on other people's data; its steps are
            then named and not counted.
        files: from which weights were read.

    Raises:
        ConfigurationError: where a run before has another unit of privacy.
        DataError: where a file has a statement that cannot be read.
    """
    trainings, ordinary = _past_of(module)
    origin = Origin()
    for file in files:
        if (known := training_behind(file)) is None:
            origin.words.append(f"weights of {file}: {_said_of(file)}")
        else:
            trainings.append(known)
    declared = ", on data that was declared to be other" if other_data else ", which count here"
    runs: dict[str, tuple[Run, ...]] = {}
    for training in trainings:
        if training.run == run:
            continue
        if not other_data:
            _require_same_unit(training, unit)
            origin.faults += faults_of(training, "before")
        for name, steps in training.runs.items():
            if name != run and count_of(steps) > count_of(runs.get(name, ())):
                runs[name] = steps
    if not other_data:
        ledger.count_earlier(runs)
    origin.words += [f"run {name}: {count_of(steps)} private steps{declared}" for name, steps in runs.items()]
    counted = {f"run {name}" for name in (run, *runs)}
    behind = [word for training in trainings if training.run != run for word in training.before]
    origin.words += dict.fromkeys(word for word in behind if word.partition(":")[0] not in counted)
    if ordinary:
        text = f"steps without privacy on {', '.join(ordinary[:3])}{' and others' if len(ordinary) > 3 else ''}"
        origin.words.append(text + (declared if other_data else ""))
        if not other_data:
            origin.faults.append(f"the weights were trained before by {text}")
    return origin


def _said_of(file: str) -> str:
    """What a file without a statement says of its weights, in words."""
    recipe = recipe_of(file) if file.endswith(".safetensors") else None
    if recipe is None:
        return "it is unknown on what they were trained"
    return f"by what it says, trained on {RANDOM_IMAGES} (recipe {recipe[:16]})"


def training_behind(file: str) -> Training | None:
    """The private run behind a file that `dpl export` has written; None where the file does not say.

    Raises:
        DataError: where what it says is no privacy statement.
    """
    if not file.endswith(".safetensors"):
        return None
    try:
        claims = statement_of(file)
    except DataError as error:
        raise DataError(f"{file} has a privacy statement that cannot be read ({error}). Export it anew.") from error
    if claims is None:
        return None
    return Training(
        claims.run,
        claims.ledger,
        claims.unit_of_privacy,
        claims.reproducible,
        claims.faults,
        before=claims.earlier_training,
    )


def _require_same_unit(training: Training, unit: str) -> None:
    if training.unit != unit:
        raise ConfigurationError(
            f"The weights were trained before by run {training.run}, which protects {training.unit}. This run would "
            f"protect {unit}, and their steps cannot be added up. Set privacy.unit_of_privacy as that run has it, or "
            "privacy.earlier_training: other_data where it was on other people's data."
        )


def faults_of(training: Training, when: str) -> list[str]:
    """What makes a training, and so any later training of the same weights, unfit for release."""
    training.look()
    reasons = [*training.faults, *(["it is reproducible"] if training.reproducible else [])]
    return [f"run {training.run}, which trained the weights {when}: {reason}" for reason in reasons]


def count_of(runs: Iterable[Run]) -> int:
    """Steps in them."""
    return sum(count for _, _, count in runs)


def released(parameters: Iterable[Tensor], training: Training) -> None:
    """Their ``.grad`` is a release of this training."""
    for parameter in parameters:
        assert parameter.grad is not None
        hook = parameter.register_post_accumulate_grad_hook(_drop_release)
        _waiting[parameter] = _Release(weakref.ref(parameter.grad), hook)
        _private.setdefault(parameter, {})[training.run] = training


def _drop_release(parameter: Tensor) -> None:
    if (release := _waiting.pop(parameter, None)) is not None:
        release.hook.remove()


def _past_of(module: nn.Module) -> tuple[list[Training], list[str]]:
    """The private runs behind its tensors, and the names of those that were trained without privacy."""
    ordinary = {mark for parameter in _ordinary.keys() for mark in _exact_mark(parameter)}  # noqa: SIM118
    every = [(copies.training, copies.marks()) for copies in _copies.values()]
    copies = [(training, known) for training, known in every if len(known)]
    found: dict[int, Training] = {}
    without: list[str] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        mine = _numbers(b"".join(marks([tensor]))) if copies else _numbers(b"")
        trainings = [*_private.get(tensor, {}).values(), *(t for t, known in copies if _holds_any(known, mine))]
        found |= {id(training): training for training in trainings}
        if tensor in _ordinary or (ordinary and not tensor.is_meta and not ordinary.isdisjoint(_exact_mark(tensor))):
            without.append(name)
    return list(found.values()), without


def marks(tensors: Iterable[Tensor]) -> list[bytes]:
    """By which copies of tensors are known, also in another shape or dtype.

    Each is a hash of some numbers, and of them as they are after rounding to bfloat16 and to float16. Tensors whose
    numbers are all the same cannot be told from others.
    """
    found: list[bytes] = []
    reading = Later()

    def note(size: int, numbers: Tensor) -> None:
        found.extend(_marks_of(size, numbers))

    for tensor in filter(_is_readable, tensors):
        reading.read(_sample(tensor), functools.partial(note, tensor.numel()))
    reading.settle()
    return found


def _sample(tensor: Tensor) -> Tensor:
    """Some numbers of a tensor, in memory of their own."""
    return tensor.detach().reshape(-1)[_places(tensor.numel(), tensor.device)]


def _marks_of(size: int, numbers: Tensor) -> list[bytes]:
    """The marks of a tensor of ``size`` numbers from some of them, on the CPU."""
    if not size or not bool((numbers != numbers[0]).any()):
        return []
    found = [_hash(size, numbers)]
    if len(numbers) >= _MANY and numbers.is_floating_point():
        rounded = numbers.bfloat16(), numbers.half().bfloat16()  # what bfloat16 makes of a copy in float16
        found += [_hash(size, each, b"rounded") for each in rounded]
    return found


def _numbers(found: bytes | bytearray) -> NDArray[np.uint64]:
    """Marks as numbers; a copy, since the row may grow."""
    return np.frombuffer(bytes(found), np.uint64)


def _holds_any(known: NDArray[np.uint64], mine: NDArray[np.uint64]) -> bool:
    """Whether one of the marks is among the known ones, which are sorted."""
    places = np.searchsorted(known, mine).clip(max=len(known) - 1)
    return bool((known[places] == mine).any())


def _exact_mark(tensor: Tensor) -> list[str]:
    """Of all numbers of a tensor, in whatever dtype; empty where they are all the same."""
    if not _is_readable(tensor) or not tensor.numel():
        return []
    numbers = tensor.detach()
    same = bool((numbers == numbers.reshape(-1)[0]).all())
    return [] if same else [fingerprint(numbers.double() if numbers.is_floating_point() else numbers)]


def _is_readable(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"


@functools.lru_cache(maxsize=256)
def _places(size: int, device: torch.device) -> Tensor:
    """The same places for all tensors of a size."""
    every = torch.arange(size)
    if size > _NUMBERS:
        every = torch.randint(size, (_NUMBERS,), generator=torch.Generator().manual_seed(size))
    return every.to(device)


def _hash(size: int, numbers: Tensor, kind: bytes = b"exact") -> bytes:
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    said = kind + size.to_bytes(8, "big") + numbers.double().numpy().tobytes()
    return hashlib.blake2b(said, digest_size=8).digest()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
    _stepping[optimizer] = _with_gradient(optimizer)
    followers = (_followed.get(parameter, ()) for group in optimizer.param_groups for parameter in group["params"])
    for weights in {weights for each in followers for weights in each}:
        weights.note()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
    # A closure may make gradients in the step, and the step may clear them.
    cleared = [(parameter, was) for parameter, was in _stepping.pop(optimizer, []) if parameter.grad is None]
    stepped: set[TrainedWeights] = set()
    for parameter, is_release in (*cleared, *_with_gradient(optimizer)):
        followers = set(_followed.get(parameter, ()))
        stepped |= followers
        if is_release:
            release = _waiting[parameter]
            release.hook.remove()
            release.version = None if parameter.grad is None else version_of(parameter.grad)
        else:
            _ordinary[parameter] = True
            for weights in followers:
                weights.note_step_without_privacy(parameter)
    for weights in stepped:
        weights.hold()


def _with_gradient(optimizer: Optimizer) -> list[tuple[Any, bool]]:
    """The parameters that an optimizer steps on, and whether by a release."""
    found = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient, release = parameter.grad, _waiting.get(parameter)
        if gradient is not None:
            same = release is not None and release.gradient() is gradient
            found.append((parameter, same and release.version in (None, version_of(gradient))))
    return found


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
