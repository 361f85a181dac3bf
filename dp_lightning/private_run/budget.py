"""What the steps of a run have spent, and what they will have spent at its end."""

from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.plan import PrivacyPlan

# Epsilon by PRV costs a tenth of a second to a second, so it is brought up to date this many times in a run.
_EPSILON_UPDATES = 20


class Budget:
    """Epsilon of a ledger, now and later.

    Args:
        plan: of the fit.
        ledger: of the run; it grows.

    Attributes:
        bound: epsilon that is not exceeded before the ledger has ``milestone`` steps.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        self.look_ahead()

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
        more = num_steps - self.ledger.num_steps
        further = [(self.plan.noise_multiplier, self.plan.sample_rate, more)] if more > 0 else []
        runs = [*self.ledger.earlier_steps, *self.ledger.runs, *further]
        return compose(runs, delta=self.plan.delta, accountant=self.plan.accountant)
