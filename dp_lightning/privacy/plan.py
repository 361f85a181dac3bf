"""The public numbers of a private run, fixed before it starts, and the noise that a privacy budget asks for.

With N training examples, an expected batch of B, T logical steps and noise multiplier sigma, every step
draws each example with probability q = B/N and adds N(0, sigma^2 S^2 I) to a sum of sensitivity S. The plan
knows epsilon(sigma, q, T, delta); calibration finds the smallest sigma with epsilon <= target. q is the
quotient B/N itself, never one over the length of a loader. Noise with b bands (``bands``) costs as much as
ceil(T / b) steps with q = b B / N.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from scipy.optimize import brentq

from dp_lightning.errors import BudgetError, ConfigurationError
from dp_lightning.privacy.accounting import Run, check_accountant, compose, compose_all
from dp_lightning.privacy.ranges import check_count, check_delta, check_noise_multiplier, is_number
from dp_lightning.privacy.schedules import Schedule

# Relative width of the interval in which calibration places the noise multiplier.
TOLERANCE = 1e-4
_LARGEST_NOISE_MULTIPLIER = 1e6
# The share of a target after which no further step is planned. With the last 1 %, as many steps again need three to
# seven times the noise of those before (B/N from 0.02 to 0.3, epsilon from 1 to 8); with 0.01 %, thousands of times.
_NEARLY_ALL = 0.99


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run draws and how often, whatever its noise is.

    Args:
        num_train: N, the number of training examples.
        expected_batch_size: B, the expected number of examples in a logical batch, over all ranks.
        num_steps: T, the number of logical optimizer steps.
        delta: below 1/num_train.
        bands: b, at most N/B: over how many steps noise is correlated; 1 is independent noise.
        noise_schedule: how the noise multiplier changes over the steps; None keeps it.

    Raises:
        ConfigurationError: a value is outside its range; the message names it.
    """

    num_train: int
    expected_batch_size: int
    num_steps: int
    delta: float
    bands: int = 1
    noise_schedule: Schedule | None = None

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
        check_count("bands", self.bands)
        if self.bands * self.expected_batch_size > self.num_train:
            raise ConfigurationError(
                f"bands must be at most N/B = {self.num_train // self.expected_batch_size}, since each step draws from "
                f"one of {self.bands} groups of the examples. Lower privacy.bands or privacy.expected_batch_size."
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
        """q, the probability with which a step draws each example of its group, b B / N."""
        return self.bands * self.expected_batch_size / self.num_train

    @property
    def epochs(self) -> float:
        """How often an example is drawn in expectation, T B / N."""
        return self.num_steps * self.expected_batch_size / self.num_train

    def noise_at(self, noise_multiplier: float, begins: int) -> float:
        """The noise multiplier of a round.

        Args:
            noise_multiplier: sigma, that of the first steps.
            begins: number of the first step of the round.
        """
        schedule = self.noise_schedule
        return noise_multiplier if schedule is None else noise_multiplier * schedule.factor(begins, self.num_steps)

    def rounds(self, noise_multiplier: float, first: int = 0, last: int | None = None) -> tuple[Run, ...]:
        """The rounds that begin with a step from ``first`` on and before ``last``, in a block that ``first`` begins.

        An example takes part in a round once at most.

        Args:
            noise_multiplier: sigma.
            first, last: numbers of steps; None is the end of the run.
        """
        begins = range(first, self.num_steps if last is None else last, self.bands)
        if self.noise_schedule is None:
            return ((noise_multiplier, self.sample_rate, len(begins)),) if begins else ()
        found = Counter(self.noise_at(noise_multiplier, step) for step in begins)
        return tuple((sigma, self.sample_rate, count) for sigma, count in found.items())

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
        spent: Sequence[Run] = (),
        steps_taken: int = 0,
    ) -> "PrivacyPlan":
        """The plan with the smallest noise multiplier, to 1e-4, whose epsilon is at most ``target_epsilon``.

        Args:
            target_epsilon, accountant: as in the plan.
            spent: rounds that count: those of the first ``steps_taken`` of the ``num_steps``, and those that the
                weights had taken before the run. The noise is then that of the steps which are left, so that all of
                them together meet the target.

        Raises:
            ConfigurationError: a value is outside its range, or no noise multiplier below 1e6 reaches the
                target.
            BudgetError: the steps taken leave no step, or have spent 99 % of the target.
        """
        check_accountant(accountant)
        _check_target(target_epsilon)
        if steps_taken >= self.num_steps:
            raise BudgetError(
                f"num_steps is {self.num_steps} and {steps_taken} are taken already. Plan more steps: "
                "trainer.max_epochs or trainer.max_steps."
            )
        before = compose(spent, delta=self.delta, accountant=accountant)
        if before >= _NEARLY_ALL * target_epsilon:
            raise BudgetError(
                f"The steps taken have spent epsilon {before:.4g} by "
                f"{accountant.upper()}, and target_epsilon is {target_epsilon:g}: too little is left for another step. "
                "Raise the target."
            )

        def epsilon(noise_multiplier: float, by: str = accountant) -> float:
            return compose([*spent, *self.rounds(noise_multiplier, steps_taken)], delta=self.delta, accountant=by)

        noise_multiplier = 1.0
        if not spent or accountant == "rdp":
            # The Renyi bound is cheap and never below the others, so its solution starts their search from above.
            noise_multiplier = _smallest_noise(lambda sigma: epsilon(sigma, "rdp"), target_epsilon, start=1.0)
        if accountant != "rdp":
            noise_multiplier = _smallest_noise(epsilon, target_epsilon, start=noise_multiplier)
        return self.with_noise(noise_multiplier, accountant=accountant, target_epsilon=target_epsilon)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(RunShape):
    """What a run has promised to do; none of it depends on the data.

    Args:
        num_train, expected_batch_size, num_steps, delta, bands, noise_schedule: as in `RunShape`.
        noise_multiplier: sigma of the first steps, noise standard deviation over sensitivity; 0 means no privacy.
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

    def noise_level(self, sensitivity: float) -> float:
        """Standard deviation of the noise in each entry of the privatized gradient, sigma S / B, in the first steps."""
        return self.noise_multiplier * sensitivity / self.expected_batch_size

    def epsilon(self, accountant: str | None = None, num_steps: int | None = None) -> float:
        """Epsilon after `num_steps` steps (all by default), by `accountant` (the plan's by default)."""
        runs = self.rounds(self.noise_multiplier, last=num_steps)
        return compose(runs, delta=self.delta, accountant=accountant or self.accountant)

    def epsilons(self) -> dict[str, float | None]:
        """Epsilon of the whole plan by "prv", "rdp" and "pld"; None for "pld" where it is not installed."""
        return compose_all(self.rounds(self.noise_multiplier), delta=self.delta)


def best_bands(shape: RunShape, target_epsilon: float) -> int:
    """The power of two b at which noise leaves the smallest ``error_of_noise``, to a hundredth the smallest such b."""
    most = min(shape.num_train // shape.expected_batch_size, shape.num_steps)
    choices = [1 << power for power in range(most.bit_length())]
    return min(choices, key=lambda bands: round(error_of_noise(replace(shape, bands=bands), target_epsilon), 2))


@functools.lru_cache(maxsize=256)
def error_of_noise(shape: RunShape, target_epsilon: float) -> float:
    """The error that the noise for a target leaves in the weights, over that of independent noise.

    The noise multipliers are those of the Renyi bound, and the errors those of ``bands``, where weights are a sum of
    gradients.
    """
    from dp_lightning.privacy.bands import coefficients, error  # they import torch, which takes seconds

    def left(bands: int) -> float:
        plan = replace(shape, bands=bands).calibrate(target_epsilon, accountant="rdp")
        return plan.noise_multiplier * error(coefficients(bands, shape.num_steps, (1.0,)), shape.num_steps)

    return left(shape.bands) / left(1)


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
