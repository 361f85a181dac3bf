"""What the steps of a run have spent, and what they will have spent at its end."""

from dp_lightning.errors import BudgetError
from dp_lightning.privacy.accounting import Ledger, Run, compose
from dp_lightning.privacy.plan import PrivacyPlan

# Epsilon by PRV costs a tenth of a second to a second, so it is brought up to date this many times in a run.
_EPSILON_UPDATES = 20


class Budget:
    """Epsilon of a ledger, now and at the end of the plan.

    Args:
        plan: of the fit.
        ledger: of the run; it grows.

    Attributes:
        planned: epsilon after the last step.
        bound: epsilon that is not exceeded before the ledger has ``milestone`` steps.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        self._epsilons: dict[tuple[Run, ...], float] = {}
        self.planned = self.at(plan.num_steps)
        self.look_ahead()

    def require_affordable(self) -> None:
        """Require that the remaining steps and those in the ledger together stay within the target.

        Raises:
            BudgetError: when they do not.
        """
        target = self.plan.target_epsilon
        if target is not None and self.planned > target:
            raise BudgetError(
                f"The steps taken and the steps planned would spend epsilon {self.planned:.3f}, above "
                f"privacy.target_epsilon {target}. Plan fewer steps, or raise the target."
            )

    def look_ahead(self) -> None:
        """Raise ``bound`` to epsilon at the next milestone, so that it is never too small in between."""
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
            totals[self.plan.noise_multiplier, self.plan.sample_rate] += more
        for sigma, q, count in self.ledger.earlier_steps:
            totals[sigma, q] += count
        runs = tuple((*kind, count) for kind, count in sorted(totals.items()))
        if runs not in self._epsilons:
            self._epsilons[runs] = compose(runs, delta=self.plan.delta, accountant=self.plan.accountant)
        return self._epsilons[runs]
