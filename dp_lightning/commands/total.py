"""What several runs on the same data have spent together, from their journals and statements alone.

The steps of all runs are composed by one accountant at one delta, as if they were the steps of a single run, so the
total is below the sum of the epsilons. A step of a journal has a name that no other step has: a run that resumed in
another folder, a copy of a journal, and two fits that resumed from one checkpoint count each step once. The steps of
earlier runs that a statement names, since its weights started from theirs, count once too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.foreign_text import read_json
from dp_lightning.privacy.accounting import Run, compose, compose_all
from dp_lightning.privacy.journal import Steps, journal_name, journals_in, read_journal, run_of, spent_in
from dp_lightning.privacy.statement import STATEMENT_FILE, PrivacyStatement, plain

Kinds = Counter[tuple[float, float]]
"""How many rounds were begun with each ``(noise_multiplier, sample_rate)``."""


@dataclass(frozen=True)
class Total:
    """The steps of several runs.

    Attributes:
        rounds: the rounds of each run, by the run's name.
        steps: the number of steps of each run; of one whose journal is not there, that of its rounds.
        delta: at which epsilon is computed.
        accountant: the accountant of the runs' plans where they agree, else "prv".
        unit: what one neighbour adds or removes, in words; empty where no run has a statement yet.
        notes: sentences about runs that are not for release, and runs whose earlier training is unknown.
    """

    rounds: Mapping[str, Kinds]
    steps: Mapping[str, int]
    delta: float
    accountant: str
    unit: str
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The number of steps of all runs."""
        return sum(self.steps.values())

    @property
    def epsilon(self) -> float:
        """Epsilon of all runs together, by ``accountant``."""
        return self.epsilon_of(*self.rounds)

    def epsilon_of(self, *runs: str) -> float:
        """Epsilon of the steps of some runs together, at the same delta."""
        return compose(self._composed(runs), delta=self.delta, accountant=self.accountant)

    def epsilons(self) -> dict[str, float | None]:
        """Epsilon of all runs by every accountant; "pld" is None where dp-accounting is not installed."""
        return compose_all(self._composed(self.rounds), delta=self.delta)

    def _composed(self, runs: Iterable[str]) -> list[Run]:
        return [(*kind, count) for run in runs for kind, count in self.rounds[run].items()]

    @property
    def sentence(self) -> str:
        """The total in one line."""
        unit = f", add or remove {self.unit}" if self.unit else ""
        runs = "1 run" if len(self.steps) == 1 else f"{len(self.steps)} runs"
        return (
            f"{runs} on the same data together: ({self.epsilon:.4g}, {self.delta:g})-DP by "
            f"{self.accountant.upper()}{unit}, {self.num_steps} steps"
        )

    def text(self) -> str:
        """The steps and epsilon of each run and of all together, and what else has to be known of them."""
        rows = [(run, steps, self.epsilon_of(run)) for run, steps in self.steps.items()]
        lines = [f"{'run':<18}{'steps':>8}{f'epsilon by {self.accountant.upper()}':>20}"]
        lines += [f"{run:<18}{steps:>8}{spent:>20.4f}" for run, steps, spent in rows]
        shown = ", ".join(f"{name.upper()} {value:.4f}" for name, value in self.epsilons().items() if value is not None)
        lines += [f"{'together':<18}{self.num_steps:>8}{self.epsilon:>20.4f}", "", f"{self.sentence}."]
        lines.append(f"By every accountant: {shown}.")
        if len(self.steps) > 1:
            lines.append("This is for runs that were planned beforehand, without a look at what others have released.")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The same in values that JSON can hold; an infinite epsilon is the string "inf"."""
        found: dict[str, Any] = {
            "epsilon": self.epsilons(),
            "delta": self.delta,
            "accountant": self.accountant,
            "unit_of_privacy": self.unit,
            "num_steps": self.num_steps,
            "runs": {run: {"num_steps": steps, "epsilon": self.epsilon_of(run)} for run, steps in self.steps.items()},
            "notes": self.notes,
        }
        return {name: plain(value) for name, value in found.items()}


def total_epsilon(folders: Iterable[str | Path], delta: float | None = None) -> Total:
    """The total of all runs with a journal at or below these folders.

    Args:
        folders: of runs, or with folders of runs.
        delta: at which epsilon is computed; default: the smallest one of the runs.

    Raises:
        DataError: a folder has no journal, or a journal was edited or lacks steps that a statement names.
        ConfigurationError: a run was chosen among several, the runs protect different units, or no run has a statement
            and ``delta`` is missing.
    """
    journals: dict[str, Steps] = {}
    claims: list[PrivacyStatement] = []
    notes: list[str] = []
    for folder in map(Path, folders):
        if not (paths := journals_in(folder)):
            raise DataError(f"{folder} has no journal of a private run. Give folders such as lightning_logs/version_0.")
        for path in paths:
            journals.setdefault(run_of(path), {}).update(read_journal(path, run_of(path)))
        for path in sorted(folder.rglob(STATEMENT_FILE)):
            facts = read_json(path)
            claims.append(PrivacyStatement.from_dict(facts))
            if (release := facts.get("release", "ok")) != "ok":
                notes.append(f"Run {claims[-1].run} is {release}.")
            if claims[-1].choice:
                raise ConfigurationError(
                    f"Run {claims[-1].run} was chosen among several, which costs epsilon {facts['epsilon']['rdp']:.4f} "
                    "by its statement, and more than its steps. Add up epsilons and deltas of statements by hand."
                )
    rounds: dict[str, Kinds] = {run: spent_in(taken.values()) for run, taken in journals.items()}
    for claim in claims:
        if claim.ledger.num_steps and claim.journal_head not in journals.get(claim.run, {}):
            raise DataError(
                f"The journal {journal_name(claim.run)} is missing or lacks steps that the statement of its run has, "
                "so what the run has spent is unknown. Restore it, and check the run with dpl verify."
            )
        for run, earlier in claim.ledger.earlier.items():
            kinds = Counter({(sigma, rate): count for sigma, rate, count in earlier})
            rounds[run] = rounds.get(run, Counter()) | kinds  # the larger record of the same run
    for run in journals:
        if run not in {claim.run for claim in claims}:
            notes.append(f"Run {run} has no statement: earlier training of its weights is unknown and not counted.")
    units = {claim.unit_of_privacy for claim in claims}
    if len(units) > 1:
        raise ConfigurationError(
            f"The runs protect different units, {' and '.join(sorted(units))}, whose steps cannot be added up."
        )
    if delta is None and not claims:
        raise ConfigurationError("None of the runs has a statement, which would name its delta: give --delta.")
    accountants = {claim.plan.accountant for claim in claims}
    delta = min(claim.plan.delta for claim in claims) if delta is None else delta
    accountant = accountants.pop() if len(accountants) == 1 else "prv"
    steps = {run: max(kinds.total(), len(journals.get(run, {}))) for run, kinds in rounds.items()}
    return Total(rounds, steps, delta, accountant, unit=next(iter(units), ""), notes=tuple(dict.fromkeys(notes)))
