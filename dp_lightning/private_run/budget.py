"""What a run may spend, what it has spent, and what it will have spent at its end."""

import math
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.errors import BudgetError, ConfigurationError
from dp_lightning.privacy.accounting import Ledger, Run, check_batch_size, compose
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import TOLERANCE, PrivacyPlan

# Epsilon by PRV can cost a second, so it is brought up to date this many times in a run.
_EPSILON_UPDATES = 10


def planned_steps(*, max_epochs: int | None, max_steps: int, num_train: int, expected_batch_size: int) -> int:
    """T: ``max_steps``, or floor(``max_epochs`` * N / B) where it is less; -1 sets no limit, and None no epochs.

    Raises:
        ConfigurationError: when neither sets a limit, or no step is left, or B is above N.
    """
    check_batch_size(expected_batch_size, num_train)
    limits = []
    if max_steps != -1:
        limits.append(max_steps)
    if max_epochs is not None and max_epochs != -1:
        limits.append(max_epochs * num_train // max(expected_batch_size, 1))
    if not limits:
        raise ConfigurationError(
            "The number of steps must be known before the start. Set trainer.max_epochs or trainer.max_steps."
        )
    if min(limits) < 1:
        raise ConfigurationError(
            "trainer.max_epochs and trainer.max_steps leave no step to take; set at least one epoch or step."
        )
    return min(limits)


class Budget:
    """Makes the plan of a run, and reads epsilon from its ledger.

    Args:
        expected_batch_size, target_epsilon, noise_multiplier, delta, accountant, not_private: settings of
            ``PrivacyCallback``.

    Raises:
        ConfigurationError: for settings that contradict each other.
    """

    def __init__(
        self,
        *,
        expected_batch_size: int,
        target_epsilon: float | None,
        noise_multiplier: float | None,
        delta: float,
        accountant: str,
        not_private: bool,
    ) -> None:
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ConfigurationError(
                "Set exactly one of privacy.target_epsilon (the noise is solved for it) and privacy.noise_multiplier; "
                f"they are {target_epsilon} and {noise_multiplier}."
            )
        if noise_multiplier == 0 and not not_private:
            raise ConfigurationError(
                "privacy.noise_multiplier is 0: the run would not be private. If that is what you want, set "
                "privacy.not_private: true."
            )
        if not_private and noise_multiplier != 0:
            raise ConfigurationError(
                "privacy.not_private is true but noise is added. Remove it, or set privacy.noise_multiplier: 0."
            )
        self.expected_batch_size, self.delta, self.accountant = expected_batch_size, delta, accountant
        self.target_epsilon, self.noise_multiplier = target_epsilon, noise_multiplier
        self.ledger = Ledger()
        self.plan: PrivacyPlan | None = None
        #: Whether the plan is that of the steps in the ledger.
        self.kept = False
        #: Targets that the run had before, each with the number of steps after which it was exchanged.
        self.earlier_targets: list[tuple[float | None, int]] = []
        #: Epsilon that is not exceeded before the next update, and epsilon after the last step.
        self.bound, self.planned = 0.0, 0.0
        self.milestone = 0
        self._epsilons: dict[tuple[Run, ...], float] = {}

    def count_steps(self, trainer: pl.Trainer, num_train: int) -> int:
        """T.

        Raises:
            ConfigurationError: when the trainer does not bound it.
        """
        return planned_steps(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            num_train=num_train,
            expected_batch_size=self.expected_batch_size,
        )

    def make_plan(self, trainer: pl.Trainer, num_train: int, *, earlier: PrivacyPlan | None = None) -> None:
        """Set ``plan``, the public numbers of the run.

        A run that goes on with the settings of its ``earlier`` plan keeps its noise. With other settings the noise of
        the steps that are left is solved for, so that they and those in the ledger together meet the target. Where
        steps in the ledger have no ``earlier`` plan, it is read off their noise.

        Raises:
            ConfigurationError: when the numbers are impossible, or the trainer does not bound the number of steps.
            BudgetError: when nothing is left to spend.
        """
        plan = PrivacyPlan(
            num_train=num_train,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.count_steps(trainer, num_train),
            noise_multiplier=1.0 if self.noise_multiplier is None else self.noise_multiplier,
            delta=self.delta,
            accountant=self.accountant,
            target_epsilon=self.target_epsilon,
        )
        if earlier is not None:
            if earlier.num_train != num_train:
                raise ConfigurationError(
                    f"The checkpoint's run trained on {earlier.num_train} examples, and there are {num_train} now. Its "
                    "epsilon holds for one data set: resume with that one, or start a new run."
                )
            if earlier.expected_batch_size != self.expected_batch_size:
                raise ConfigurationError(
                    f"The checkpoint's run has privacy.expected_batch_size {earlier.expected_batch_size}, and it is "
                    f"{self.expected_batch_size} now; epochs and steps are counted by it. Set it to the run's value."
                )
            noted = [target for target, _ in self.earlier_targets[-1:]] == [earlier.target_epsilon]
            if earlier.target_epsilon != self.target_epsilon and not noted:
                self.earlier_targets.append((earlier.target_epsilon, self.ledger.num_steps))
        if earlier is None and self.ledger.num_steps:
            earlier = self._plan_of_ledger(plan)
        if earlier is not None and self.target_epsilon is not None:
            plan = replace(plan, noise_multiplier=earlier.noise_multiplier)
        self.kept = plan == earlier
        if self.target_epsilon is not None:
            if not self.kept:
                plan = PrivacyPlan.calibrate(
                    **_without_noise(plan), taken=self.ledger.runs, earlier=self.ledger.earlier_steps
                )
            if earlier is not None and plan.noise_multiplier > 2 * earlier.noise_multiplier > 0:
                rank_zero_warn(
                    f"To meet privacy.target_epsilon {self.target_epsilon} the steps that are left need a noise "
                    f"multiplier of {plan.noise_multiplier:.4g}, after {earlier.noise_multiplier:.4g} so far. They "
                    "will teach the model little: raise the target, or stop here."
                )
        self.plan = plan

    def _plan_of_ledger(self, plan: PrivacyPlan) -> PrivacyPlan | None:
        """``plan`` with the noise of the steps in the ledger; None where they were planned otherwise."""
        (noise_multiplier, sample_rate), *others = self.ledger.totals
        if self.ledger.num_steps >= plan.num_steps:
            return replace(plan, noise_multiplier=self.ledger.runs[-1][0])  # no step is left to solve for
        if self.target_epsilon is not None:
            plan = PrivacyPlan.calibrate(**_without_noise(plan), earlier=self.ledger.earlier_steps)
        # Another machine may solve for the same noise to another last digit.
        same = math.isclose(plan.noise_multiplier, noise_multiplier, rel_tol=2 * TOLERANCE)
        if others or sample_rate != plan.sample_rate or not same:
            return None
        return replace(plan, noise_multiplier=noise_multiplier)

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the plan are taken, and no setting asks for others."""
        return self.kept and self.plan is not None and self.ledger.num_steps >= self.plan.num_steps

    def require_affordable(self) -> None:
        """The steps that are still planned must fit into the target together with those in the ledger.

        Raises:
            BudgetError: when they do not.
        """
        assert self.plan is not None
        self.planned = self.at(self.plan.num_steps)
        if self.target_epsilon is not None and self.planned > self.target_epsilon:
            raise BudgetError(
                f"The steps taken and the steps planned would spend epsilon {self.planned:.3f}, above "
                f"privacy.target_epsilon {self.target_epsilon}. Plan fewer steps, or raise the target."
            )

    def announcement(self, clip_plan: ClipPlan, *, reproducible: bool) -> str:
        """The plan in a few lines, for the start of a run."""
        plan = self.plan
        assert plan is not None
        text = (
            f"Privacy plan: N {plan.num_train}, B {plan.expected_batch_size}, q {plan.sample_rate:.6g}, "
            f"T {plan.num_steps} steps, sigma {plan.noise_multiplier:.4f}, sensitivity {clip_plan.sensitivity:g} "
            f"({clip_plan.kind}, {clip_plan.factor}), delta {plan.delta:g}"
        )
        if self.ledger.num_steps:
            text += f"\n{self.ledger.num_steps} of the steps are taken, with epsilon {self.spent():.3f}"
        if earlier := self.ledger.earlier:
            steps = sum(count for _, _, count in self.ledger.earlier_steps)
            text += f"\nThe weights had taken {steps} private steps before, in {', '.join(earlier)}: they count too"
        if plan.noise_multiplier == 0:
            return text + "\nNo noise is added: this run is NOT PRIVATE."
        text += f"\nEpsilon {self.planned:.3f} by {plan.accountant.upper()} after the last step"
        return text + ("\nThe run is reproducible: it is NOT FOR RELEASE." if reproducible else "")

    def look_ahead(self) -> None:
        """Bring ``bound`` up to epsilon at the next milestone, so that it is never too small in between."""
        assert self.plan is not None
        interval = max(self.plan.num_steps // _EPSILON_UPDATES, 1)
        self.milestone = min(self.ledger.num_steps + interval, self.plan.num_steps)
        self.bound = self.at(self.milestone)

    def spent(self) -> float:
        """Epsilon of the steps in the ledger, by the plan's accountant."""
        return self.at(self.ledger.num_steps)

    def at(self, num_steps: int) -> float:
        """Epsilon once the ledger holds ``num_steps``, or of those it holds where they are more."""
        totals = self.ledger.totals
        if (more := num_steps - totals.total()) > 0:
            assert self.plan is not None
            totals[self.plan.noise_multiplier, self.plan.sample_rate] += more
        for sigma, q, count in self.ledger.earlier_steps:
            totals[sigma, q] += count
        runs = tuple((*kind, count) for kind, count in sorted(totals.items()))
        if runs not in self._epsilons:
            self._epsilons[runs] = compose(runs, delta=self.delta, accountant=self.accountant)
        return self._epsilons[runs]

    def state_dict(self) -> dict[str, Any]:
        """Ledger, plan and earlier targets in plain values."""
        assert self.plan is not None
        return {
            "ledger": self.ledger.state_dict(),
            "plan": asdict(self.plan),
            "earlier_targets": [list(pair) for pair in self.earlier_targets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the ledger and the earlier targets; the plan is made anew, with the saved one as ``earlier``."""
        self.ledger.load_state_dict(state["ledger"])
        self.earlier_targets = [(target, steps) for target, steps in state["earlier_targets"]]


def _without_noise(plan: PrivacyPlan) -> dict[str, Any]:
    settings = asdict(plan)
    del settings["noise_multiplier"]
    return settings
