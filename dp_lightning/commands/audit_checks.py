"""The checks of an audit and their results: the noise, the canaries, and contributions without noise.

All tests together raise a false alarm with probability at most `FALSE_ALARM`, shared equally among them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from dp_lightning.analysis.auditing import NoiseTests, gaussian_epsilon, mu_lower_bound
from dp_lightning.commands.audit_runs import AuditRuns, Canaries, steps_of_canaries
from dp_lightning.privacy.accounting import epsilon

FALSE_ALARM = 1e-4
# Relative to the sensitivity: float32 rounding when the sum is divided by B and multiplied by B again.
_ROUNDING = 1e-5
_OF_CANARIES, _OF_EXAMPLES = "Largest contribution of a canary", "Largest contribution by the module's own loss"
_BESIDE = "Canaries change nothing outside their coordinates"


@dataclass(frozen=True)
class Check:
    """One line of the page.

    Attributes:
        subject: what was checked.
        found: what was observed, and what is claimed.
        holds: whether it agrees with the claim.
        tests: how many tests it stands for.
    """

    subject: str
    found: str
    holds: bool
    tests: int = 0


class Audit:
    """The checks of one configuration.

    Args:
        runs: the runs of the configuration.
        count: number of canaries that take part.

    Attributes:
        mu: claimed mean score of the canaries that take part, sqrt(T) / sigma.
        claimed, shown: epsilon of the steps with canaries by the plan's accountant, and the lower bound on it.
        included, excluded: scores of the canaries that take part, and of those that do not.
        shown_by_tensor: the lower bound from the canaries of each parameter alone.
        contributions: largest contributions measured without noise, over the sensitivity, by subject.
    """

    def __init__(self, runs: AuditRuns, count: int) -> None:
        self.runs, self.plan, self.clip_plan = runs, runs.plan, runs.clip_plan
        self.steps = steps_of_canaries(self.plan.noise_multiplier)
        self.mu = math.sqrt(self.steps) / self.plan.noise_multiplier
        self.claimed = epsilon(
            noise_multiplier=self.plan.noise_multiplier,
            sample_rate=1.0,
            num_steps=self.steps,
            delta=self.plan.delta,
            accountant=self.plan.accountant,
        )
        self.noise = self._take_noise()
        self._take_canaries(count)
        self.contributions = self._take_contributions(count)
        self.num_tests = len(self.noise) + 1 + len(self._by_tensor)
        self.alpha = FALSE_ALARM / self.num_tests
        self.shown = self._shown(self.included, self.excluded, self.mu)
        of_one = self.mu / math.sqrt(len(runs.groups))  # the part of one clipping group
        self.shown_by_tensor = {name: self._shown(*scores, of_one) for name, scores in self._by_tensor.items()}
        self.noise_tests = list(self.noise.results())
        self.checks = [*self._noise_checks(), *self._canary_checks(), *self._contribution_checks()]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if not check.holds]

    def _take_noise(self) -> NoiseTests:
        noise = NoiseTests()
        claimed = self.runs.noise_standard_deviation

        def look(step: int, sums: dict[str, Tensor]) -> None:
            noise.add({name: total / claimed for name, total in sums.items()})

        self.runs.noise(look)
        return noise

    def _take_canaries(self, count: int) -> None:
        totals: list[Tensor] = []
        chosen: list[Tensor] = []

        def look(step: int, included: Canaries, excluded: Canaries, released: list[Tensor]) -> None:
            found = [which.along(released) / self.runs.noise_standard_deviation for which in (included, excluded)]
            totals[:] = [total + more for total, more in zip(totals, found, strict=True)] if totals else found
            chosen[:] = [included.chosen, excluded.chosen]

        self.runs.canaries(count, self.steps, look)
        scores = [total / math.sqrt(self.steps) for total in totals]
        self.included, self.excluded = (
            (score.sum(1) / which.sum(1).sqrt()).numpy() for score, which in zip(scores, chosen, strict=True)
        )
        self._by_tensor = {
            name: (scores[0][:, k][chosen[0][:, k]].numpy(), scores[1][:, k][chosen[1][:, k]].numpy())
            for k, name in enumerate(self.runs.sizes)
            if chosen[0][:, k].any() and chosen[1][:, k].any()
        }

    def _take_contributions(self, count: int) -> dict[str, float]:
        """Measured without noise: of canaries, outside their coordinates, and of examples by the module's own loss."""
        largest: dict[str, float] = {}
        sensitivity = self.clip_plan.sensitivity

        def of_canaries(step: int, included: Canaries, excluded: Canaries, released: list[Tensor]) -> None:
            along = included.along(released)
            largest[_OF_CANARIES] = _largest(along.norm(dim=1) / sensitivity)
            beyond = sum(float(total.double().square().sum()) for total in released) - float(along.square().sum())
            largest[_BESIDE] = math.sqrt(max(beyond, 0.0)) / sensitivity / len(along)

        def of_examples(step: int, sums: dict[str, Tensor]) -> None:
            norm = torch.stack([total.double().norm() for total in sums.values()]).norm() / sensitivity
            largest[_OF_EXAMPLES] = max(largest.get(_OF_EXAMPLES, 0.0), _largest(norm))

        self.runs.canaries(count, 1, of_canaries, private=False)
        self.runs.contributions(of_examples)
        return largest

    def _shown(self, included: NDArray[np.float64], excluded: NDArray[np.float64], mu: float) -> float:
        """Lower bound on epsilon from the scores, at the error probability of one test."""
        found = mu_lower_bound(included, excluded, (mu / 2, mu), alpha=self.alpha)
        # Thresholds cannot tell larger values apart.
        return gaussian_epsilon(min(found, 50.0), self.plan.delta)

    def doubled(self) -> float:
        """The epsilon that canaries with typical scores would show if each contributed twice the bound."""
        quantiles = [(np.arange(len(scores)) + 0.5) / len(scores) for scores in (self.included, self.excluded)]
        included, excluded = (stats.norm.ppf(quantile) for quantile in quantiles)
        return self._shown(included + 2 * self.mu, excluded, self.mu)

    def _noise_checks(self) -> list[Check]:
        sigma, found = self.plan.noise_multiplier, []
        words = {
            "size": ("Standard deviation of the noise in each tensor", "of the claimed one"),
            "shape": ("The noise is normal (Kolmogorov-Smirnov)", "standard deviation of the sample"),
            "steps": ("No noise is reused in another step", "correlation"),
            "tensors": ("No noise is reused in another tensor", "correlation"),
        }
        for kind, (subject, unit) in words.items():
            tests = [test for test in self.noise_tests if test.kind == kind]
            if not tests:
                continue
            worst = min(tests, key=lambda test: (test.p_value, -abs(test.observed)))
            failed = [test for test in tests if test.p_value < self.alpha]
            least = f"{worst.subject}, {worst.observed:.4g} {unit}, p = {worst.p_value:.2g}"
            text = f"{_of(failed, tests)}; least likely: {least}"
            if kind == "size":
                text += f" (claimed: {sigma * self.clip_plan.sensitivity:.4g} on the sum)"
            found.append(Check(subject, text, not failed, len(tests)))
        return found

    def _canary_checks(self) -> list[Check]:
        above = [name for name, shown in self.shown_by_tensor.items() if shown > self.claimed]
        everything = (
            f"epsilon at least {self.shown:.3g}, claimed {self.claimed:.4g} for these {self.steps} steps at q = 1"
        )
        checks = [Check("Canaries, all together", everything, self.shown <= self.claimed, 1)]
        if self.shown_by_tensor:
            name, most = max(self.shown_by_tensor.items(), key=lambda item: item[1])
            text = f"{_of(above, list(self.shown_by_tensor))}; most: {name}, epsilon at least {most:.3g}"
            checks.append(Check("Canaries of each tensor alone", text, not above, len(self.shown_by_tensor)))
        return checks

    def _contribution_checks(self) -> list[Check]:
        checks = []
        for subject, share in self.contributions.items():
            limit = _ROUNDING if subject == _BESIDE else 1 + _ROUNDING
            text = f"{share:.6g} of the sensitivity {self.clip_plan.sensitivity:g}, without noise"
            checks.append(Check(subject, text, share <= limit))
        return checks

    def to_dict(self) -> dict[str, Any]:
        """Numbers by name."""
        return {
            "holds": not self.failed,
            "checks": [vars(check) for check in self.checks],
            "noise_multiplier": self.plan.noise_multiplier,
            "sensitivity": self.clip_plan.sensitivity,
            "delta": self.plan.delta,
            "canaries": len(self.included),
            "steps": self.steps,
            "epsilon_claimed": self.claimed,
            "epsilon_shown": self.shown,
            "epsilon_shown_by_tensor": self.shown_by_tensor,
            "noise": [vars(test) for test in self.noise_tests],
            "steps_of_noise": self.runs.steps_of_noise,
            "contributions": self.contributions,
            "tests": self.num_tests,
            "false_alarm": FALSE_ALARM,
        }


def _largest(values: Tensor) -> float:
    """The largest value, or infinity if one is NaN."""
    return float(values.nan_to_num(nan=math.inf).max())


def _of(failed: list[Any], tests: list[Any]) -> str:
    return f"{len(failed)} of {len(tests)} fail"
