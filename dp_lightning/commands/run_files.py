"""What the files of a run's folder say, for its page: nothing is computed from data or weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import yaml

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.experiments.event_files import Curve, curves_in
from dp_lightning.experiments.runs import read_facts, result_in
from dp_lightning.foreign_text import load_yaml, read_json, read_text
from dp_lightning.privacy.accounting import Ledger, check_accountant, compose
from dp_lightning.privacy.journal import Step, journal_name, journals_in, read_journal, run_of, spent_in, up_to
from dp_lightning.privacy.ranges import check_delta
from dp_lightning.privacy.statement import PrivacyStatement

STATEMENT, SNR, CONFIG = "privacy_statement.json", "snr.json", "config.yaml"
# Points of the curve of epsilon: each takes PRV a tenth of a second to a second.
_POINTS = 12
# The curves that `result.json` has, by their tags. It has those of the whole run, also after a resume in a new folder.
_IN_RESULT = {"test/accuracy": "test_accuracy_curve", "val/accuracy": "val_accuracy_curve"}


class Spent(NamedTuple):
    """Epsilon over the steps of a journal.

    Attributes:
        curve: at some of the steps that the statement counts, or of all where there is no statement.
        to_come: from there to the end of the plan; empty if it is reached or unknown.
        further: steps that the journal has beyond those that the statement counts.
    """

    curve: Curve
    to_come: Curve
    further: int
    delta: float
    accountant: str
    target: float | None


class Snr(NamedTuple):
    """Signal-to-noise ratios per epoch; None where one is unknown.

    Attributes:
        by_parameter: size and ratios of each parameter tensor.
    """

    steps: list[int | None]
    whole: list[float]
    by_parameter: dict[str, tuple[int, list[float | None]]]


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder; None is a file that is missing.

    Attributes:
        statement: `privacy_statement.json`, and ``facts`` its values as they are written.
        statement_text: `privacy_statement.md`.
        curves: by their tags.
        spent: None where the journal is missing or does not hold, and ``not_accounted`` is the reason.
        names: of the files and folders in it.
    """

    folder: Path
    result: Mapping[str, Any] | None
    statement: PrivacyStatement | None
    facts: Mapping[str, Any]
    statement_text: str | None
    snr: Snr | None
    curves: Mapping[str, Curve]
    config: Mapping[str, Any]
    config_text: str | None
    spent: Spent | None
    not_accounted: str
    names: list[str]

    @classmethod
    def read(cls, folder: Path) -> "RunFiles":
        """Read a folder such as ``lightning_logs/version_0``.

        Raises:
            DataError: if it is not the folder of a private run, or one of its files was edited.
        """
        facts = read_json(folder / STATEMENT) if (folder / STATEMENT).is_file() else None
        if facts is None and not journals_in(folder):
            raise _no_run(folder)
        statement = None if facts is None else PrivacyStatement.from_dict(facts)
        config_text = _text(folder / CONFIG)
        config = _mapping(folder / CONFIG, config_text)
        result = result_in(folder)
        try:
            spent, problem = _spent(folder, statement, config), ""
        except (DataError, ConfigurationError) as error:
            spent, problem = None, str(error)
        return cls(
            folder=folder,
            result=result,
            statement=statement,
            facts=facts or {},
            statement_text=_text((folder / STATEMENT).with_suffix(".md")),
            snr=_snr(folder / SNR),
            curves=_curves(folder, result or {}),
            config=config,
            config_text=config_text,
            spent=spent,
            not_accounted=problem,
            names=sorted(path.name for path in folder.iterdir() if not path.name.endswith(".part")),
        )

    @property
    def release(self) -> str:
        """What the statement says about a release: ``ok``, or the reasons against it."""
        if self.statement is None:
            return "not for release: there is no privacy statement"
        return str(self.facts["release"])


def _no_run(folder: Path) -> DataError:
    below = (f"lightning_logs/*/{STATEMENT}", f"run/lightning_logs/*/{STATEMENT}")
    found = [path.parent for pattern in below for path in sorted(folder.glob(pattern))]
    hint = f" Did you mean {found[-1]}?" if found else " Give one such as lightning_logs/version_0."
    return DataError(f"{folder} is not the folder of a private run: it has no {STATEMENT} and no journal.{hint}")


def _text(path: Path) -> str | None:
    try:
        return read_text(path)
    except OSError:
        return None


def _mapping(path: Path, text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        content = load_yaml(text, yaml.safe_load)
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _curves(folder: Path, result: Mapping[str, Any]) -> dict[str, Curve]:
    curves, steps = curves_in(folder), result.get("evaluated_after_steps") or []
    for tag, key in _IN_RESULT.items():
        values = result.get(key) or []
        if values and len(values) == len(steps):
            curves[tag] = Curve([int(step) for step in steps], [float(value) for value in values])
    return curves


def _spent(folder: Path, statement: PrivacyStatement | None, config: Mapping[str, Any]) -> Spent:
    """Account the journal's steps.

    Raises:
        DataError, ConfigurationError: saying why they cannot be.
    """
    settings: Mapping[str, Any]
    if statement is not None:
        run, earlier, settings = statement.run, statement.ledger, asdict(statement.plan)
    else:
        (run, *others), earlier = map(run_of, journals_in(folder)), Ledger()
        if others:
            raise DataError("There are journals of several runs, and no statement yet.")
        settings = found if isinstance(found := config.get("privacy"), dict) else {}
    delta, accountant = settings.get("delta", math.nan), settings.get("accountant", "prv")
    target = settings.get("target_epsilon")
    check_delta(delta)
    check_accountant(accountant)
    path = folder / journal_name(run)
    if not path.is_file():
        raise DataError(f"The journal {path.name} is missing.")
    every = read_journal(path, run)
    counted = list((every if statement is None else up_to(statement.journal_head, every)).values())

    def epsilon(steps: list[Step], more: int = 0) -> float:
        totals = spent_in(steps)
        if more and statement is not None:
            totals[statement.plan.noise_multiplier, statement.plan.sample_rate] += more
        runs = [(*kind, count) for kind, count in totals.items()]
        return compose([*runs, *earlier.earlier_steps], delta=delta, accountant=accountant)

    taken, planned = len(counted), 0 if statement is None else statement.plan.num_steps
    at = sorted({min(1, taken), *(round(taken * k / _POINTS) for k in range(_POINTS + 1))})
    curve = Curve(at, [epsilon(counted[:steps]) for steps in at])
    ahead = sorted({taken, (taken + planned) // 2, planned}) if planned > taken and taken else []
    to_come = Curve(ahead, [epsilon(counted, steps - taken) for steps in ahead])
    if not all(map(math.isfinite, curve.values)):
        raise DataError("Epsilon is infinite.")
    return Spent(curve, to_come, len(every) - taken, delta, accountant, target)


def _snr(path: Path) -> Snr | None:
    """The ratios in `snr.json`.

    Raises:
        DataError: if it has another form.
    """
    if not path.is_file():
        return None
    facts = read_facts(path)
    try:
        parameters = {
            str(name): (int(fact["size"]), _numbers(fact["snr"])) for name, fact in facts["by_parameter"].items()
        }
        whole, steps = [float(value) for value in facts["snr"]], _numbers(facts["steps"])
        count = len(whole)
        if any(size < 1 or len(ratios) != count for size, ratios in parameters.values()) or len(steps) != count:
            raise ValueError("its lists differ in length")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a file of signal-to-noise ratios ({type(error).__name__}: {error}).") from error
    return Snr([None if step is None else int(step) for step in steps], whole, parameters)


def _numbers(values: Any) -> list[float | None]:
    if not isinstance(values, list) or not all(isinstance(value, int | float | NoneType) for value in values):
        raise ValueError("it holds something other than numbers")
    return values
