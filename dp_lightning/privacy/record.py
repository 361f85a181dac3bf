"""The record of a private run: its steps, and what has trained the weights before it.

The record hangs on the weights: a weak map, which releases alone fill, leads from each parameter of this process to the
runs that have released gradients for it. So a later run of the same parameters counts their steps. Training in another
process is known where a statement came with the weights (``exported``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.exported import RANDOM_IMAGES, recipe_of, statement_of
from dp_lightning.privacy.journal import Journal, run_name
from dp_lightning.privacy.statement import ONE_EXAMPLE


@dataclass(eq=False)
class RunRecord:
    """What is known of a private run.

    Attributes:
        run: name of the run and of its journal.
        ledger: the steps that the run has taken, and the steps of earlier runs that count.
        journal: the files on rank 0 to which each step is written.
        earlier_training: what else trained the weights before the run, in words.
        unit: what one neighbour adds or removes, in words.
        reproducible: whether the noise of the run follows from a seed that is written down.
        noise_coefficients: c of the latest steps' noise, as ``bands`` has them.
        faults: reasons that keep the run from release, in words; a step may add one.
    """

    run: str = field(default_factory=run_name)
    ledger: Ledger = field(default_factory=Ledger)
    journal: Journal | None = None
    earlier_training: list[str] = field(default_factory=list)
    unit: str = ONE_EXAMPLE
    reproducible: bool = False
    noise_coefficients: tuple[float, ...] = (1.0,)
    faults: set[str] = field(default_factory=set)

    def count(self, *, noise_multiplier: float, sample_rate: float, place: int = 0) -> None:
        """Count one step, the ``place``-th of its round, first in the journal, then in the ledger.

        The step's result may be released afterwards.

        Raises:
            DataError: when the journal cannot be written; the step must not be released.
        """
        if self.journal is not None:
            self.journal.record(noise_multiplier=noise_multiplier, sample_rate=sample_rate, place=place)
        self.ledger.record(noise_multiplier=noise_multiplier, sample_rate=sample_rate, place=place)


# For each parameter, and for each gradient that was released for one: the records of the runs that have released
# gradients for the parameter, by the names of these runs.
_known = WeakIdKeyDictionary()


def released(parameters: Iterable[Tensor], record: RunRecord) -> None:
    """Enter the gradients of these parameters as a release of a run."""
    for parameter in parameters:
        records = _known.setdefault(parameter, {})
        records[record.run] = record
        _known[parameter.grad] = records


def note_earlier_training(
    module: nn.Module, record: RunRecord, *, other_data: bool = False, files: Iterable[str] = ()
) -> None:
    """Count the private steps behind a module's parameters in ``record``, and name their other training.

    Args:
        module: the module that the run trains.
        record: the record of the run that begins.
        other_data: whether all earlier training is declared to be on other people's data: named, and not counted.
        files: the files from which weights were read.

    Raises:
        ConfigurationError: where an earlier run has another unit of privacy.
        DataError: where the statement in a file cannot be read.
    """
    known = {name: run for each in module.parameters() for name, run in _known.get(each, {}).items()}
    trainings, words = list(known.values()), record.earlier_training
    declared = ", on data that was declared to be other"
    for file in files:
        if (claims := statement_of(file)) is None:
            recipe, said = recipe_of(file), "it is unknown on what they were trained"
            if recipe is not None:
                said = f"by what it says, trained on {RANDOM_IMAGES} (recipe {recipe[:16]})"
            words.append(f"weights of {file}: {said}")
            continue
        behind = RunRecord(run=claims.run, ledger=claims.ledger, unit=claims.unit_of_privacy)
        behind.earlier_training, behind.reproducible = list(claims.earlier_training), claims.reproducible
        behind.faults = claims.lasting_faults
        trainings.append(behind)
    for training in (training for training in trainings if training.run != record.run):
        words += training.earlier_training
        runs = {training.run: training.ledger.runs, **training.ledger.earlier}
        runs.pop(record.run, None)
        if other_data:
            steps = {run: sum(count for _, _, count in taken) for run, taken in runs.items()}
            words += [f"run {run}: {count} private steps{declared}" for run, count in steps.items()]
            continue
        if training.unit != record.unit:
            raise ConfigurationError(
                f"The weights were trained before by run {training.run}, which protects {training.unit}. This run "
                f"would protect {record.unit}, and their steps cannot be added up. Set privacy.unit_of_privacy as that "
                "run has it, or privacy.earlier_training: other_data where it was on other people's data."
            )
        record.ledger.count_earlier(runs)
        reasons = [*training.faults, *(["it is reproducible"] if training.reproducible else [])]
        record.faults |= {f"run {training.run}, which trained the weights before: {reason}" for reason in reasons}
    if ordinary := [name for name, parameter in module.named_parameters() if _has_raw_gradient(parameter)]:
        text = f"steps without privacy on {', '.join(ordinary[:3])}{' and others' if len(ordinary) > 3 else ''}"
        words.append(text + (declared if other_data else ""))
        if not other_data:
            record.faults.add(
                f"the weights were trained before by {text}, whose gradients are still in .grad (if no optimizer has "
                "stepped on them, call module.zero_grad() before the run)"
            )
    record.earlier_training = list(dict.fromkeys(words))


def _has_raw_gradient(parameter: Tensor) -> bool:
    """Whether a trained parameter holds a gradient that no private run has released, as an ordinary fit leaves it."""
    return parameter.requires_grad and parameter.grad is not None and parameter.grad not in _known
