"""The record of a private run: its steps, and what has trained the weights before it.

The record hangs on the weights: a weak map, which releases alone fill, leads from each parameter of this process to the
runs that have released gradients for it. So a later run of the same parameters counts their steps. Training in another
process is known where a statement came with the weights (``exported``).
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.accounting import Ledger, Run
from dp_lightning.privacy.exported import RANDOM_IMAGES, recipe_of, statement_of
from dp_lightning.privacy.journal import Journal, run_name
from dp_lightning.privacy.statement import ONE_EXAMPLE


@dataclass
class Origin:
    """What has trained the weights before a run.

    Attributes:
        words: each training.
        faults: what of it keeps the run from release.
    """

    words: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(eq=False)
class RunRecord:
    """What is known of a private run.

    Attributes:
        run: its name, which is that of its journal.
        ledger: its steps, which may become more.
        journal: where each step is brought to disk, on rank 0.
        origin: what has trained the weights before it.
        unit: what one neighbour adds or removes, in words.
        reproducible: whether its noise follows from a seed that is written down.
        faults: what has happened in the run that keeps it from release, in words; they may become more.
    """

    run: str = field(default_factory=run_name)
    ledger: Ledger = field(default_factory=Ledger)
    journal: Journal | None = None
    origin: Origin = field(default_factory=Origin)
    unit: str = ONE_EXAMPLE
    reproducible: bool = False
    faults: set[str] = field(default_factory=set)

    def count(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step, on disk first; its result may be released afterwards.

        Raises:
            DataError: when the journal cannot be written; the step must not be released.
        """
        if self.journal is not None:
            self.journal.record(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
        self.ledger.record(noise_multiplier=noise_multiplier, sample_rate=sample_rate)


@dataclass
class _Releases:
    """The runs that have released gradients for a parameter, by their names, and its last released gradient."""

    records: dict[str, RunRecord] = field(default_factory=dict)
    gradient: weakref.ref[Tensor] | None = None


_known = WeakIdKeyDictionary()  # parameter: _Releases


def released(parameters: Iterable[Tensor], record: RunRecord) -> None:
    """Note that the gradients of these parameters are a release of a run."""
    for parameter in parameters:
        assert parameter.grad is not None
        releases = _known.setdefault(parameter, _Releases())
        releases.records[record.run] = record
        releases.gradient = weakref.ref(parameter.grad)


def origin_of(module: nn.Module, record: RunRecord, *, other_data: bool, files: Iterable[str] = ()) -> Origin:
    """Count the private steps behind a module's parameters in ``record.ledger``, and say what else is known.

    Args:
        record: of the run that begins.
        other_data: whether someone has declared that all training before was on other people's data; its steps are
            then named and not counted.
        files: from which weights were read.

    Raises:
        ConfigurationError: where a run before has another unit of privacy.
        DataError: where a file has a statement that cannot be read.
    """
    every = [releases for parameter in module.parameters() if (releases := _known.get(parameter)) is not None]
    trainings = list({name: known for releases in every for name, known in releases.records.items()}.values())
    origin = Origin()
    for file in files:
        if (behind := training_behind(file)) is None:
            origin.words.append(f"weights of {file}: {_said_of(file)}")
        else:
            trainings.append(behind)
    declared = ", on data that was declared to be other" if other_data else ", which count here"
    runs: dict[str, tuple[Run, ...]] = {}
    for training in (training for training in trainings if training.run != record.run):
        if not other_data:
            _require_same_unit(training, record.unit)
            reasons = [*training.faults, *(["it is reproducible"] if training.reproducible else [])]
            origin.faults += [f"run {training.run}, which trained the weights before: {reason}" for reason in reasons]
        for name, steps in {**training.ledger.earlier, training.run: training.ledger.runs}.items():
            if name != record.run and _count(steps) > _count(runs.get(name, ())):
                runs[name] = steps
    if not other_data:
        record.ledger.count_earlier(runs)
    origin.words += [f"run {name}: {_count(steps)} private steps{declared}" for name, steps in runs.items()]
    named = {f"run {name}" for name in (record.run, *runs)}
    words = [word for training in trainings for word in training.origin.words]
    origin.words += dict.fromkeys(word for word in words if word.partition(":")[0] not in named)
    if ordinary := [name for name, parameter in module.named_parameters() if _has_raw_gradient(parameter)]:
        text = f"steps without privacy on {', '.join(ordinary[:3])}{' and others' if len(ordinary) > 3 else ''}"
        origin.words.append(text + (declared if other_data else ""))
        if not other_data:
            origin.faults.append(
                f"the weights were trained before by {text}, whose gradients are still in .grad (if no optimizer has "
                "stepped on them, call module.zero_grad() before the run)"
            )
    return origin


def _has_raw_gradient(parameter: Tensor) -> bool:
    """Whether a trained parameter holds a gradient that no private run has released, as an ordinary fit leaves it."""
    releases = _known.get(parameter)
    last = None if releases is None or releases.gradient is None else releases.gradient()
    return parameter.requires_grad and parameter.grad is not None and parameter.grad is not last


def training_behind(file: str) -> RunRecord | None:
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
    return RunRecord(
        run=claims.run,
        ledger=claims.ledger,
        origin=Origin(words=list(claims.earlier_training)),
        unit=claims.unit_of_privacy,
        reproducible=claims.reproducible,
        faults=set(claims.faults),
    )


def _said_of(file: str) -> str:
    """What a file without a statement says of its weights, in words."""
    recipe = recipe_of(file) if file.endswith(".safetensors") else None
    if recipe is None:
        return "it is unknown on what they were trained"
    return f"by what it says, trained on {RANDOM_IMAGES} (recipe {recipe[:16]})"


def _require_same_unit(training: RunRecord, unit: str) -> None:
    if training.unit != unit:
        raise ConfigurationError(
            f"The weights were trained before by run {training.run}, which protects {training.unit}. This run would "
            f"protect {unit}, and their steps cannot be added up. Set privacy.unit_of_privacy as that run has it, or "
            "privacy.earlier_training: other_data where it was on other people's data."
        )


def _count(runs: Iterable[Run]) -> int:
    """The number of steps in runs of equal steps."""
    return sum(count for _, _, count in runs)
