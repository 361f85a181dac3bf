"""The public numbers of a private run, fixed before it starts, and the noise that a privacy budget asks for.

With N training examples, an expected batch of B, T logical steps and noise multiplier sigma, every step
draws each example with probability q = B/N and adds N(0, sigma^2 S^2 I) to a sum of sensitivity S. The plan
knows epsilon(sigma, q, T, delta); calibration finds the smallest sigma with epsilon <= target. q is the
quotient B/N itself, never one over the length of a loader.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from scipy.optimize import brentq

from dp_lightning.errors import BudgetError, ConfigurationError
from dp_lightning.privacy.accounting import Run, check_accountant, compose, compose_all
from dp_lightning.privacy.ranges import check_count, check_delta, check_noise_multiplier, is_number

# Relative width of the interval in which calibration places the noise multiplier.
TOLERANCE = 1e-4
_LARGEST_NOISE_MULTIPLIER = 1e6
# The share of a target after which no further step is planned. With the last 1 %, as many steps again need three to
# seven times the noise of those before (B/N from 0.02 to 0.3, epsilon from 1 to 8); with 0.01 %, thousands of times.
_NEARLY_ALL = 0.99
#: What to say of a plan that is ``priced_by_renyi``, with the setting.
BEYOND_PRV = (
    "PRV finds no epsilon below the Renyi bound here, so the bound stands in for it. {} may need less noise "
    "(pip install 'dp-lightning[pld]')."
)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run draws and how often, whatever its noise is.

    Args:
        num_train: N, the number of training examples.
        expected_batch_size: B, the expected number of examples in a logical batch, over all ranks.
        num_steps: T, the number of logical optimizer steps.
        delta: below 1/num_train.

    Raises:
        ConfigurationError: a value is outside its range; the message names it.
    """

    num_train: int
    expected_batch_size: int
    num_steps: int
    delta: float

    def __post_init__(self) -> None:
        if self.num_train == 0:
            raise ConfigurationError(
                "The training set is empty (num_train is 0). Look at the folder or file that it is read from, and at "
                "what is filtered out of it."
            )
        check_count("num_train", self.num_train)
        check_count("expected_batch_size", self.expected_batch_size)
        check_count("num_steps", self.num_steps)
        if self.expected_batch_size > self.num_train:
            raise ConfigurationError(
                f"expected_batch_size must be at most num_train = {self.num_train}; got {self.expected_batch_size}. "
                "Lower privacy.expected_batch_size: it counts what num_train counts, examples, or persons under "
                "unit_of_privacy: group."
            )
        check_delta(self.delta)
        if self.delta >= 1 / self.num_train:
            raise ConfigurationError(
                f"delta must be below 1/num_train = {1 / self.num_train:.3g}; got {self.delta:g}. "
                "At 1/num_train, publishing one whole example would count as private."
            )

    @classmethod
    def of_length(
        cls,
        *,
        num_train: int,
        expected_batch_size: int,
        delta: float,
        max_epochs: int | Fraction | None,
        max_steps: int = -1,
        limit_train_batches: float = 1.0,
    ) -> "RunShape":
        """The shape of a run with the limits of a Trainer.

        Args:
            num_train, expected_batch_size, delta: N, B and delta.
            max_epochs, max_steps: T is ``max_steps``, or the steps of ``max_epochs`` epochs if those are fewer; -1 sets
                no limit, and None no epochs.
            limit_train_batches: the steps of an epoch that are taken, as a number, or as a share where it is a float.

        Raises:
            ConfigurationError: if neither sets a limit, or no step is left, or a number is impossible.
        """
        limits = [] if max_steps == -1 else [max_steps]
        if max_epochs is not None and max_epochs != -1:
            epoch = steps_of_epoch(num_train, expected_batch_size)
            share = isinstance(limit_train_batches, float)
            taken = int(epoch * limit_train_batches if share else min(epoch, limit_train_batches))
            limits.append(math.ceil(max_epochs * taken))
        if not limits:
            raise ConfigurationError(
                "The number of steps must be known before the start. Set trainer.max_epochs or trainer.max_steps."
            )
        if min(limits) < 1:
            raise ConfigurationError(
                "trainer.max_epochs, trainer.max_steps and trainer.limit_train_batches leave no step to take; set at "
                "least one epoch or step."
            )
        return cls(num_train=num_train, expected_batch_size=expected_batch_size, num_steps=min(limits), delta=delta)

    @property
    def sample_rate(self) -> float:
        """q, the probability with which a step draws each example."""
        return self.expected_batch_size / self.num_train

    def with_noise(
        self, noise_multiplier: float, *, accountant: str = "prv", target_epsilon: float | None = None
    ) -> "PrivacyPlan":
        """The plan of a run of this shape; its arguments and what it raises are those of `PrivacyPlan`."""
        shape = {each.name: getattr(self, each.name) for each in fields(RunShape)}
        return PrivacyPlan(
            **shape, noise_multiplier=noise_multiplier, accountant=accountant, target_epsilon=target_epsilon
        )

    def calibrate(
        self,
        target_epsilon: float,
        *,
        accountant: str = "prv",
        taken: Sequence[Run] = (),
        earlier: Sequence[Run] = (),
    ) -> "PrivacyPlan":
        """The plan with the smallest noise multiplier, to 1e-4, whose epsilon is at most ``target_epsilon``.

        Args:
            target_epsilon, accountant: as in the plan.
            taken: steps of the ``num_steps`` that were taken with other noise. The noise is then that of the
                steps which are left, so that all of them together meet the target.
            earlier: steps that the weights had taken before the run, which count too.

        Raises:
            ConfigurationError: a value is outside its range, or no noise multiplier below 1e6 reaches the
                target.
            BudgetError: the steps taken leave no step, or have spent 99 % of the target.
        """
        check_accountant(accountant)
        _check_target(target_epsilon)
        behind = [*earlier, *taken]
        steps = self.num_steps - sum(count for _, _, count in taken)
        if steps < 1:
            raise BudgetError(
                f"num_steps is {self.num_steps} and {self.num_steps - steps} are taken already. Plan more steps: "
                "trainer.max_epochs or trainer.max_steps."
            )
        before = compose(behind, delta=self.delta, accountant=accountant)
        if before >= _NEARLY_ALL * target_epsilon:
            raise BudgetError(
                f"The {sum(count for _, _, count in behind)} steps taken have spent epsilon {before:.4g} by "
                f"{accountant.upper()}, and target_epsilon is {target_epsilon:g}: too little is left for another step. "
                "Raise the target."
            )

        def spent(noise_multiplier: float, by: str = accountant) -> float:
            return compose([*behind, (noise_multiplier, self.sample_rate, steps)], delta=self.delta, accountant=by)

        noise_multiplier = 1.0
        if not behind or accountant == "rdp":
            # The Renyi bound is cheap and never below the others, so its solution starts their search from above.
            noise_multiplier = _smallest_noise(lambda sigma: spent(sigma, "rdp"), target_epsilon, start=1.0)
        if accountant != "rdp":
            noise_multiplier = _smallest_noise(spent, target_epsilon, start=noise_multiplier)
        return self.with_noise(noise_multiplier, accountant=accountant, target_epsilon=target_epsilon)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(RunShape):
    """What a run has promised to do; none of it depends on the data.

    Args:
        num_train, expected_batch_size, num_steps, delta: N, B, T and delta, as in `RunShape`.
        noise_multiplier: sigma, noise standard deviation over sensitivity; 0 means no privacy.
        accountant: whose epsilon the plan has to keep, "prv", "rdp" or "pld".
        target_epsilon: the budget, or None.

    Raises:
        ConfigurationError: a value is outside its range; the message names it.
    """

    noise_multiplier: float
    accountant: str = "prv"
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise_multiplier(self.noise_multiplier)
        check_accountant(self.accountant)
        if self.target_epsilon is not None:
            _check_target(self.target_epsilon)

    def noise_on_sum(self, sensitivity: float) -> float:
        """Standard deviation of the noise in each entry of the clipped sum, sigma S.

        Args:
            sensitivity: S, the L2 sensitivity of the sum; C under flat clipping.
        """
        return self.noise_multiplier * sensitivity

    def noise_level(self, sensitivity: float) -> float:
        """Standard deviation of the noise in each entry of the privatized gradient, sigma S / B."""
        return self.noise_on_sum(sensitivity) / self.expected_batch_size

    def epsilon(self, accountant: str | None = None, num_steps: int | None = None) -> float:
        """Epsilon after `num_steps` steps (all by default), by `accountant` (the plan's by default)."""
        run = self.noise_multiplier, self.sample_rate, self.num_steps if num_steps is None else num_steps
        return compose([run], delta=self.delta, accountant=accountant or self.accountant)

    def epsilons(self) -> dict[str, float | None]:
        """Epsilon of the whole plan by "prv", "rdp" and "pld"; None for "pld" where it is not installed."""
        return compose_all([(self.noise_multiplier, self.sample_rate, self.num_steps)], delta=self.delta)

    @property
    def priced_by_renyi(self) -> bool:
        """Whether PRV finds no epsilon below the Renyi bound, such as for an epsilon of a million."""
        return self.accountant == "prv" and self.noise_multiplier > 0 and self.epsilon() == self.epsilon("rdp")

    def noise_norm(self, *, num_parameters: int, sensitivity: float) -> float:
        """Root mean square norm of the noise in one privatized gradient, sigma * S * sqrt(d) / B.

        Args:
            num_parameters: d, the number of trained parameters.
            sensitivity: S, as in `noise_on_sum`.
        """
        return self.noise_level(sensitivity) * math.sqrt(num_parameters)


def steps_of_epoch(num_train: int, expected_batch_size: int) -> int:
    """The logical steps of an epoch, max(1, round(N / B)): as many as draw each example once in expectation."""
    return max(1, round(num_train / max(expected_batch_size, 1)))


def _check_target(target_epsilon: float) -> None:
    if not is_number(target_epsilon) or not 0 < target_epsilon < math.inf:
        raise ConfigurationError(f"target_epsilon must be a finite number above 0; got {target_epsilon!r}.")


def _smallest_noise(spent: Callable[[float], float], target: float, *, start: float) -> float:
    """The smallest sigma with spent(sigma) <= target, to `TOLERANCE`, on the side that meets the target."""
    spent = functools.cache(spent)  # the search asks again at the ends of its interval
    high = start
    while spent(high) > target:
        if high >= _LARGEST_NOISE_MULTIPLIER:
            raise ConfigurationError(
                f"target_epsilon = {target:g} cannot be reached: at noise_multiplier = {high:g} epsilon is "
                f"still {spent(high):.3g}. Raise target_epsilon or delta, or take fewer steps."
            )
        high = min(2 * high, _LARGEST_NOISE_MULTIPLIER)
    # The exact accountants need 5 to 10 % less noise than Renyi DP, so the first guess below mostly ends
    # the search.
    low = 0.85 * high
    while spent(low) <= target:
        high, low = low, 0.85 * low

    def excess(log_sigma: float) -> float:
        # log epsilon is almost linear in log sigma; the cap keeps an infinite epsilon out of the
        # interpolation.
        return min(50.0, math.log(max(spent(math.exp(log_sigma)), 1e-300) / target))

    root = brentq(excess, math.log(low), math.log(high), xtol=TOLERANCE / 4)
    sigma = math.exp(root)
    # The root has an error of its own; step up until the target is met.
    while sigma < high and spent(sigma) > target:
        sigma *= 1 + TOLERANCE / 2
    return min(sigma, high)
