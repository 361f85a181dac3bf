"""The privacy statement of a run: what is guaranteed, with which numbers, and what is not.

Epsilon comes from the ledger, which has the steps actually taken, not from the plan. The statement claims
(epsilon, delta)-differential privacy (Dwork et al. 2006) of the sequence of privatized gradients, and by
post-processing of the weights computed from it. It names every number that was released beside them, and
says "not for release" whenever a condition of the theorem does not hold, such as a noise seed that is
written down.
"""

import copy
import json
import math
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.privacy.accounting import ACCOUNTANTS, Ledger, Run, best_guess, compose_all
from dp_lightning.privacy.choice import epsilon_of_choice
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.schedules import Schedule

#: The version of a package; to find it, all of its metadata are read.
installed = cache(version)
#: Under which name the metadata of exported weights holds their statement.
STATEMENT = "privacy_statement"
#: The file of it that machines read, in the folder of a run.
STATEMENT_FILE = "privacy_statement.json"
#: Epsilon above which a run is not for release. A test for one example that is right with certainty may then be wrong
#: about others less than once in exp(20), half a billion: the guarantee excludes nothing that an attack would do.
LARGEST_EPSILON = 20.0
#: What a neighbour adds or removes: an element of the training set, or all of a person's elements.
ONE_EXAMPLE, ONE_PERSON = "one training example", "one person (all images with the same group)"
_ISOLATION = {
    "together": "by construction, since the loss runs under vmap, where it sees a single example",
    "one_by_one": "example by example, where the code is trusted to keep nothing from one example to the next",
}
_CHANGING_NORM = {
    "schedule": "The sensitivity below is that of the first steps, and changes with the clipping norm by a schedule. ",
    "adaptive": "The sensitivity below is that of the first step, and changes with the clipping norm, which follows a "
    "quantile (Andrew et al. 2021): each step also releases, with noise, how many of its examples have a norm of at "
    "most the clipping norm, and both releases together cost what the noise multiplier says. ",
}
# What no run's epsilon covers.
_NEVER_COVERED = (
    "Weights that the run started from, and the statistics of frozen normalisation layers that came with them: if they "
    "were trained on the same examples, what that run has spent adds to this epsilon.",
    "Hyperparameter search that the guarantee does not name: other runs on the same data spend their own epsilon, and "
    "so does choosing among them.",
    "The choice of an epoch or a learning rate by a score on test or validation data: that data is not protected, and "
    "the best test score is not an unbiased one.",
    "Floating-point arithmetic: the theorem is about real numbers, and Gaussian noise in floating point has gaps that "
    "an attacker may use (Mironov 2012).",
)


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """A snapshot of a run's guarantee.

    Args:
        plan: the public numbers that the run was started with.
        ledger: the steps taken so far; copied, so that later steps do not change this statement.
        clipping: the clip plan in plain values (groups, norms, factor), and where gradients are taken unless at the
            parameters.
        sensitivity: L2 sensitivity of the clipped sum under the stated neighbours.
        sampler: how batches were drawn, in words.
        noise_coefficients: c of the latest steps, as ``bands`` has them; one coefficient stands for independent noise.
        unit_of_privacy: what one neighbour adds or removes.
        unprotected: log tags of everything computed from raw training examples, and what else was written that may be.
        examples: how the loss saw one example at a time, ``together`` or ``one_by_one``.
        reproducible: all random numbers came from a seed that is written down.
        postprocessing: what was done to the privatized gradient, in words.
        batch_norm: what was done to the module's BatchNorm layers before the run, in words.
        lost_steps: steps of the ledger that an interruption has lost: they are spent, and not in the weights.
        num_ranks: processes that took the latest steps together.
        run: name of the run, part of its journals' names.
        journal_head: name of the last step in its journal, which stands for all of them.
        earlier_training: what has trained the weights before the run, in words, beside the earlier runs in the ledger.
        faults: what has happened during the run that keeps it from release, in words.
        weights: SHA-256 of the parameters and buffers that it speaks of (``weights.digest_of``).
        versions: package name to version.
        choice: where the run was chosen among several, the facts that `epsilon_of_choice` takes, without delta.
        files: of an export, the SHA-256 of each file that was written with the statement, by its name.
    """

    plan: PrivacyPlan
    ledger: Ledger
    clipping: dict[str, Any]
    sensitivity: float
    sampler: str
    noise_coefficients: tuple[float, ...] = (1.0,)
    unit_of_privacy: str = ONE_EXAMPLE
    unprotected: tuple[str, ...] = ()
    examples: str = "together"
    reproducible: bool = False
    postprocessing: str = "none"
    batch_norm: str = "none"
    lost_steps: int = 0
    num_ranks: int = 1
    run: str = ""
    journal_head: str = ""
    earlier_training: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    weights: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ledger", copy.deepcopy(self.ledger))

    def saved(self) -> dict[str, Any]:
        """The values that `from_dict` reads, as JSON and a checkpoint can hold them; no epsilon is computed."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("plan", "ledger")}
        ledger = self.ledger.state_dict()
        found: dict[str, Any] = plain(
            {
                **asdict(self.plan),
                "sample_rate": self.plan.sample_rate,
                "num_steps": self.ledger.num_steps,
                "num_steps_planned": self.plan.num_steps,
                "ledger": ledger["runs"],
                "earlier_runs": ledger["earlier"],
                **own,
            }
        )
        return found

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "PrivacyStatement":
        """The statement of the values of `saved`, or of those that `privacy_statement.json` holds.

        Raises:
            DataError: where they are no statement.
        """
        try:
            plan = {item.name: facts[item.name] for item in fields(PrivacyPlan) if item.name != "num_steps"}
            if plan["noise_schedule"] is not None:
                plan["noise_schedule"] = Schedule(**plan["noise_schedule"])
            ledger = Ledger()
            saved = {"runs": facts["ledger"], "steps": facts["num_steps"], "earlier": facts["earlier_runs"]}
            ledger.load_state_dict(saved)
            known = {item.name for item in fields(cls)} - {"plan", "ledger"}
            rest: dict[str, Any] = {
                name: tuple(facts[name]) if isinstance(facts[name], list) else facts[name] for name in known
            }
            return cls(plan=PrivacyPlan(**plan, num_steps=facts["num_steps_planned"]), ledger=ledger, **rest)
        except (KeyError, TypeError, ValueError, DpLightningError) as error:
            raise DataError(f"This is not a privacy statement: {type(error).__name__}: {error}") from error

    @cached_property
    def epsilon(self) -> dict[str, float | None]:
        """Epsilon of the steps taken, by every accountant; infinite where the run is not private.

        Where the run was chosen among several, epsilon of the choice, which has a bound by "rdp" alone.
        """
        if self.choice:
            before = [run for runs in self.ledger.earlier.values() for run in runs]
            runs = [*([*before, *each] for each in self.choice["runs"]), self.ledger.spent]
            bound = epsilon_of_choice(**{**self.choice, "runs": runs}, delta=self.plan.delta)
            return {**dict.fromkeys(ACCOUNTANTS), "rdp": bound}
        return compose_all(self.ledger.spent, delta=self.plan.delta)

    @property
    def _spent(self) -> float:
        spent = self.epsilon[self.plan.accountant]
        return math.inf if spent is None else spent

    @cached_property
    def release(self) -> str:
        """ "ok", or "not for release: " and every reason."""
        spent = self._spent
        target, reasons = self.plan.target_epsilon, []
        if math.isinf(spent):
            reasons.append("not private: epsilon is infinite")
        elif target is not None and spent > target:
            reasons.append(f"epsilon {spent:.4g} exceeds its target of {target:g}")
        elif spent > LARGEST_EPSILON:
            reasons.append(f"epsilon {spent:.4g} is above {LARGEST_EPSILON:g} and protects nobody")
        reasons.extend(self.faults)
        if self.reproducible:
            reasons.append("it is reproducible, and whoever knows its seed can subtract the noise")
        return f"not for release: {'; '.join(reasons)}" if reasons else "ok"

    @property
    def lasting_faults(self) -> set[str]:
        """What keeps a run that trains these weights further from release."""
        uncounted = "its weights were chosen among several runs, and the price of the choice is not counted"
        return {*self.faults, *([uncounted] if self.choice else [])}

    def to_dict(self) -> dict[str, Any]:
        """The statement in values that JSON can hold; an infinite number is the string "inf"."""
        follows = {
            "epsilon": plain(self.epsilon),
            "neighboring_relation": "add_or_remove_one",
            "private": not math.isinf(self._spent),
            "release": self.release,
            "isolation": _ISOLATION[self.examples],
        }
        return {**follows, **self.saved()}

    def short(self) -> str:
        """The guarantee, what lies outside of it, and whether the weights are for release: three lines."""
        spent, plan = self._spent, self.plan
        guarantee = (
            f"({spent:.4g}, {plan.delta:g})-DP by {plan.accountant.upper()}, add or remove {self.unit_of_privacy}"
        )
        return (
            f"{'NOT PRIVATE: epsilon is infinite' if math.isinf(spent) else guarantee}, "
            f"{self.ledger.num_steps} of {plan.num_steps} steps\n"
            f"Unprotected values, do not publish: {', '.join(self.unprotected) or 'none'}\nRelease: {self.release}"
        )

    def to_markdown(self) -> str:
        """The statement for a reader: the guarantee, its numbers, what it does not cover."""
        rows = self.to_dict() | {
            "ledger": list(map(_steps, self.ledger.runs)),
            "earlier_runs": {name: list(map(_steps, runs)) for name, runs in self.ledger.earlier.items()},
        }
        table = "\n".join(f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in rows.items())
        outside = "\n".join(f"- {text}" for text in self._not_covered())
        return (
            f"# Privacy statement\n\nRelease: {self.release}.\n\n## For one person\n\n{self._for_one_person()}\n\n"
            f"## Guarantee\n\n{self._guarantee()}\n\n"
            f"## Numbers\n\n| | |\n| --- | --- |\n{table}\n\n## What the guarantee does not "
            f"cover\n\n{outside}\n"
        )

    def write(self, directory: str | Path) -> tuple[Path, Path]:
        """Write privacy_statement.json and privacy_statement.md into `directory`, each in one step."""
        folder = Path(directory)
        as_json = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        paths = folder / STATEMENT_FILE, folder / "privacy_statement.md"
        for path, text in zip(paths, (as_json, self.to_markdown()), strict=True):
            with replacing(path) as file:
                file.write(text.encode())
        return paths

    def _for_one_person(self) -> str:
        """The guarantee in words, for the person who decides on a release."""
        if math.isinf(self._spent):
            return "Nobody in the training data is protected."
        percent = math.ceil(1e4 * best_guess(self._spent, self.plan.delta)) / 100  # never rounded down
        who, several = "a person's images were", ""
        if self.unit_of_privacy != ONE_PERSON:
            who, several = "one image was", " A person with several images is protected less than that."
        return (
            f"Somebody who has the model, and knows all other images, guesses whether {who} among the training data. "
            f"The guess is right in at most {percent:g} % of cases, where tossing a coin is right in 50 %.{several} "
            "Validation and test images, logs, and other runs on the same data are not covered (see below)."
        )

    def _guarantee(self) -> str:
        spent = self._spent
        if math.isinf(spent):
            return "None. This run is not private: its weights may reveal any training example."
        before = "Together with the steps of earlier private runs, the" if self.ledger.earlier else "The"
        persons = (
            "An example of a step is a person: the images that are drawn of the person for the step, always of the "
            "same number. So the guarantee is the same for a person of one image and of many. "
            if self.unit_of_privacy == ONE_PERSON
            else ""
        )
        changing = "".join(text for rule, text in _CHANGING_NORM.items() if rule in self.clipping)
        drawn, scale = ("", "standard deviation") if self.plan.bands == 1 else (" of one group", "the scale")
        claim = (
            f"{before} sequence of {self.ledger.num_steps} privatized gradients is ({spent:.4g}, "
            f"{self.plan.delta:g})-differentially private, by the {self.plan.accountant.upper()} "
            f"accountant's upper bound, for data sets that differ by adding or removing "
            f"{self.unit_of_privacy}. {persons}The model's weights are computed from these gradients and from "
            "public values alone, so the guarantee holds for them too (post-processing)."
        )
        if self.choice:
            claim = (
                f"The weights are ({spent:.4g}, {self.plan.delta:g})-differentially private, by a bound on the Renyi "
                "divergence of a choice among runs (Papernot and Steinke 2022), for data sets that differ by adding or "
                f"removing {self.unit_of_privacy}. {persons}They are those of the best, by a score on other images, "
                f"of a secret number of runs ({self.choice['distribution']}, {self.choice['expected_runs']:g} on "
                "average), each with settings drawn at random. No other run, and nothing of this run but its weights, "
                "is for release."
            )
        return (
            f"{claim}\n\nIt rests on Poisson sampling: every step draws each example{drawn} independently with the "
            "sample rate below, and the draw stays secret. Each example's contribution to a step has an L2 norm of at "
            f"most the sensitivity, and Gaussian noise of {scale} noise multiplier times sensitivity is added once to "
            f"the sum{self._correlation()}. {changing}One example's contribution depends on no other example: "
            f"{_ISOLATION[self.examples]}. What is trusted: each element of the data set is a separate record, and "
            "the data set's methods look at one element; torch's kernels treat rows separately; and hooks "
            "neither read the training set nor make anything depend on a logged training loss."
        )

    def _correlation(self) -> str:
        """What noise that is correlated over steps changes in the guarantee."""
        if (bands := self.plan.bands) == 1:
            return ""
        return (
            f", correlated over {bands} steps by the noise coefficients below (Choquette-Choo et al. 2023): each "
            f"example is in one of {bands} groups by a secret draw, and steps draw from one group after the other, "
            f"with {bands} times the rate of independent noise, so that {bands} steps are one round, and cost like one"
        )

    def _not_covered(self) -> list[str]:
        tags = ", ".join(f"`{tag}`" for tag in self.unprotected)
        logged = (
            "Values that may be computed from raw training examples, and are logged or saved without noise: "
            f"{tags}. Releasing them is outside the guarantee."
            if tags
            else "Values computed from raw training examples: none were logged in the training steps and epochs of "
            "this run. Values that were logged elsewhere, such as at the end of a validation, are not examined."
        )
        changed = (
            "Numbers chosen during the run: the noise was changed after some steps. The theorem composes steps whose "
            "noise does not depend on what earlier steps have released."
        )
        units = "persons" if self.unit_of_privacy == ONE_PERSON else "examples"
        public = (
            f"Facts that are public here: the number of training {units}, the names of the classes, the settings "
            "of the run, the model's architecture, and whatever numbers the module held when the run started, such as "
            "buffers."
        )
        expected = {sigma for sigma, _, _ in self.plan.rounds(self.plan.noise_multiplier)}
        replanned = not {sigma for sigma, _ in self.ledger.totals} <= expected
        return [logged, *([changed] if replanned else []), *_NEVER_COVERED, public]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: an infinite number is the string "inf"."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _steps(run: Run) -> str:
    noise_multiplier, sample_rate, count = run
    return f"{count} times noise multiplier {noise_multiplier:.6g}, sample rate {sample_rate:.6g}"


def _cell(value: Any) -> str:
    """A value of the statement, in a row of its table."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_cell, value)) or "none"
    if value is None or value == "":
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", chr(92) + "|")
