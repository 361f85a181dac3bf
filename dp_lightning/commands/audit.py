"""`dpl audit`: does the private step of a configuration keep what its privacy plan claims?

The configuration's module takes steps at q = 1 on synthetic images. Canaries test whether the releases show who took
part, the noise is tested by itself, and contributions are measured without noise. No private image is read and no
model is kept. All tests together raise a false alarm with probability at most 1e-4, shared equally among them.
docs/audit.md says what an audit can show and what it cannot.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dp_lightning.analysis.auditing import NoiseTests, gaussian_epsilon, mu_lower_bound
from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.audit_runs import AuditRuns, Canaries
from dp_lightning.commands.configs import with_paths
from dp_lightning.privacy.accounting import compose

FALSE_ALARM = 1e-4
# Relative to the sensitivity: float32 rounding when the sum is divided by B and multiplied by B again.
_ROUNDING = 1e-5
_OF_CANARIES, _OF_EXAMPLES = "Largest contribution of a canary", "Largest contribution by the module's own loss"
_BESIDE = "Canaries change nothing outside their coordinates"
# What each kind of test of the noise looks at, and what its number is.
_NOISE = {
    "size": ("Standard deviation of the noise in each tensor", "of the claimed one"),
    "shape": ("The noise is normal (Kolmogorov-Smirnov)", "standard deviation of the sample"),
    "steps": ("No noise is reused in another step", "correlation"),
    "tensors": ("No noise is reused in another tensor", "correlation"),
}


def main(arguments: list[str]) -> None:
    """Print which checks hold and which fail, and write their numbers; exits with 1 if one fails."""
    options, of_fit = _parser().parse_known_args(with_paths(arguments)[1:])
    require_writable(options.out, "--out")
    audit = Audit(AuditRuns(of_fit), options.canaries)
    if not audit.runs.is_first:
        return
    with replacing(options.out / "numbers.json") as file:
        file.write((json.dumps(audit.to_dict(), indent=1) + "\n").encode())
    for check in audit.checks:
        print(f"{'ok    ' if check.holds else 'FAILED'}  {check.subject}: {check.found}")
    failed = sum(not check.holds for check in audit.checks)
    print(
        f"\n{failed} of {len(audit.checks)} checks failed."
        if failed
        else f"\nAll {len(audit.checks)} checks hold. That is no proof: an audit says nothing about the sampler, about "
        "faults that need particular images, or about random numbers that somebody could guess."
    )
    sys.exit(1 if failed else 0)


class Check(NamedTuple):
    """One line of the output: what was checked, what was observed beside the claim, and whether they agree."""

    subject: str
    found: str
    holds: bool


Scores = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Scores of the canaries that take part, and of those that do not."""


class Audit:
    """The checks of one configuration.

    Args:
        runs: Runs of the configuration.
        count: Number of canaries that take part.

    Attributes:
        mu: Claimed mean score of the canaries that take part, sqrt(T) / sigma.
        claimed, shown: Epsilon of the steps with canaries by the plan's accountant, and the lower bound on it.
        shown_by_tensor: Lower bound from the canaries of each parameter alone.
        columns: Norm of the coefficients of correlated noise.
        contributions: Largest contributions measured without noise, over the sensitivity, by subject.
    """

    def __init__(self, runs: AuditRuns, count: int) -> None:
        self.runs, self.plan = runs, runs.plan
        self.sensitivity = runs.clip_plan.sensitivity
        sigma = self.plan.noise_multiplier
        self.steps = min(max(math.ceil((0.7 * sigma) ** 2), 2), 16)  # so that a doubled contribution stands out
        self.mu = math.sqrt(self.steps) / sigma
        delta, accountant = self.plan.delta, self.plan.accountant
        self.claimed = compose([(sigma, 1.0, self.steps)], delta=delta, accountant=accountant)
        self.noise, claimed = NoiseTests(), runs.noise_standard_deviation
        chosen = runs.noise(lambda _, sums: self.noise.add({name: total / claimed for name, total in sums.items()}))
        self.columns = math.hypot(*chosen)
        together, by_tensor = self._take_canaries(count)
        self.contributions = self._take_contributions(count)
        self.alpha = FALSE_ALARM / (len(self.noise) + 1 + len(by_tensor))
        self.shown = self._shown(*together, self.mu)
        of_one = self.mu / math.sqrt(len(runs.groups))  # the part of one clipping group
        self.shown_by_tensor = {name: self._shown(*scores, of_one) for name, scores in by_tensor.items()}
        self.noise_tests = list(self.noise.results())
        self.checks = [*self._noise_checks(), *self._canary_checks(), *self._contribution_checks()]

    def _take_canaries(self, count: int) -> tuple[Scores, dict[str, Scores]]:
        """The scores of all canaries, and those of each parameter's canaries alone."""
        totals: list[Tensor] = []
        chosen: list[Tensor] = []
        scale = self.runs.noise_standard_deviation * math.sqrt(self.steps)

        def look(included: Canaries, excluded: Canaries, released: list[Tensor]) -> None:
            found = [which.along(released) / scale for which in (included, excluded)]
            totals[:] = [total + more for total, more in zip(totals, found, strict=True)] if totals else found
            chosen[:] = [included.chosen, excluded.chosen]

        self.runs.canaries(count, self.steps, look)
        included, excluded = (
            (score.sum(1) / which.sum(1).sqrt()).numpy() for score, which in zip(totals, chosen, strict=True)
        )
        return (included, excluded), {
            name: (totals[0][:, k][chosen[0][:, k]].numpy(), totals[1][:, k][chosen[1][:, k]].numpy())
            for k, name in enumerate(self.runs.sizes)
            if chosen[0][:, k].any() and chosen[1][:, k].any()
        }

    def _take_contributions(self, count: int) -> dict[str, float]:
        """The largest contributions without noise: of canaries, beside their coordinates, and of examples."""
        largest: dict[str, float] = {}

        def of_canaries(included: Canaries, excluded: Canaries, released: list[Tensor]) -> None:
            along = included.along(released)
            largest[_OF_CANARIES] = _largest(along.norm(dim=1) / self.sensitivity)
            beyond = sum(float(total.double().square().sum()) for total in released) - float(along.square().sum())
            largest[_BESIDE] = math.sqrt(max(beyond, 0.0)) / self.sensitivity / len(along)

        def of_examples(step: int, sums: dict[str, Tensor]) -> None:
            squares = sum(total.double().square().sum() for total in sums.values())
            norm = _largest(squares.sqrt() / self.sensitivity)  # type: ignore[union-attr]
            largest[_OF_EXAMPLES] = max(largest.get(_OF_EXAMPLES, 0.0), norm)

        self.runs.canaries(count, 1, of_canaries, private=False)
        self.runs.contributions(of_examples)
        return largest

    def _shown(self, included: NDArray[np.float64], excluded: NDArray[np.float64], mu: float) -> float:
        """Lower bound on epsilon from the scores, at the error probability of one test."""
        found = mu_lower_bound(included, excluded, (mu / 2, mu), alpha=self.alpha)
        # Thresholds cannot tell larger values apart.
        return gaussian_epsilon(min(found, 50.0), self.plan.delta)

    def _noise_checks(self) -> list[Check]:
        found = []
        for kind, (subject, unit) in _NOISE.items():
            if tests := [test for test in self.noise_tests if test.kind == kind]:
                worst = min(tests, key=lambda test: (test.p_value, -abs(test.observed)))
                failed = sum(test.p_value < self.alpha for test in tests)
                text = (
                    f"{failed} of {len(tests)} fail; least likely: {worst.subject}, {worst.observed:.4g} {unit}, p = "
                    f"{worst.p_value:.2g}"
                )
                found.append(Check(subject, text, not failed))
        if self.plan.bands > 1:
            holds = self.columns <= 1 + _ROUNDING
            found.append(Check("Norm of the columns of correlated noise", f"{self.columns:.6g}, at most 1", holds))
        return found

    def _canary_checks(self) -> list[Check]:
        everything = (
            f"epsilon at least {self.shown:.3g}, claimed {self.claimed:.4g} for these {self.steps} steps at q = 1"
        )
        checks = [Check("Canaries, all together", everything, self.shown <= self.claimed)]
        if self.shown_by_tensor:
            above = sum(shown > self.claimed for shown in self.shown_by_tensor.values())
            name, most = max(self.shown_by_tensor.items(), key=lambda item: item[1])
            text = f"{above} of {len(self.shown_by_tensor)} fail; most: {name}, epsilon at least {most:.3g}"
            checks.append(Check("Canaries of each tensor alone", text, not above))
        return checks

    def _contribution_checks(self) -> list[Check]:
        checks = []
        for subject, share in self.contributions.items():
            text = f"{share:.6g} of the sensitivity {self.sensitivity:g}, without noise"
            checks.append(Check(subject, text, share <= _ROUNDING + (subject != _BESIDE)))
        return checks

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the audit by name."""
        return {
            "holds": all(check.holds for check in self.checks),
            "checks": [check._asdict() for check in self.checks],
            "epsilon_claimed": self.claimed,
            "epsilon_shown": self.shown,
            "epsilon_shown_by_tensor": self.shown_by_tensor,
            "noise": [vars(test) for test in self.noise_tests],
            "contributions": self.contributions,
        }


def _largest(values: Tensor) -> float:
    """The largest value, or infinity if one is NaN."""
    return float(values.nan_to_num(nan=math.inf).max())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl audit",
        description=__doc__,
        epilog="Every other option is one of dpl fit, such as --config and --privacy.target_epsilon. Exits with 1 "
        "if a check fails.",
        allow_abbrev=False,
    )
    count = "canaries that take part; more of them find smaller faults but take longer; default: 500"
    parser.add_argument("--canaries", type=int, default=500, help=count)
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder of numbers.json; default: audit")
    return parser
