"""The numbers of a first private run, by rules that need only N and the size of the network.

The noise in one privatized gradient has the norm nu = sigma C sqrt(d) / B, and the gradient itself at most C. At a
given number of steps T, nu hardly depends on B as long as B is at least N/4: a smaller batch gains less by sampling
than it loses by the division by B. So B = N/4, and T is small. docs/own_data.md shows what the rules give.
"""

import math
from dataclasses import dataclass

from dp_lightning.privacy.plan import PrivacyPlan, RunShape

#: Fewer images than that start with the features of a pretrained network.
FEW_IMAGES = 10_000
#: B over N.
BATCH_SHARE = 4
#: Largest B from scratch, where a larger batch costs time (De et al. 2022), and on features, where it costs none.
LARGEST_BATCH, LARGEST_FEATURE_BATCH = 4096, 16_384
#: C.
MAX_GRAD_NORM = 1.0
#: Momentum of SGD.
MOMENTUM = 0.9
_EPOCHS, _FEATURE_EPOCHS = 50, 25
# The learning rate times nu is at most the first number, and the rate itself the second; docs/own_data.md has the
# measurements. From scratch a larger rate costs little accuracy, but makes wrong answers too sure of themselves.
_RATES, _FEATURE_RATES = (0.04, 0.3), (0.15, 1.0)
# On features of length 1 it is the noise of one weight, nu / sqrt(d), which is that of a logit.
_UNIT_RATES = (0.015, 30.0)


@dataclass(frozen=True)
class StartingPoint:
    """A first run.

    Attributes:
        plan: N, B, T, delta and sigma.
        epochs: trainer.max_epochs.
        num_parameters: d, what is trained.
        learning_rate: of SGD with momentum, before the schedule.
        limited_by_noise: whether the learning rate would be higher with less noise.
    """

    plan: PrivacyPlan
    epochs: int
    num_parameters: int
    learning_rate: float
    limited_by_noise: bool

    @property
    def noise_norm(self) -> float:
        """nu, the norm of the noise in one gradient, where a gradient without noise has at most C."""
        return noise_norm(self.plan, self.num_parameters)


def starting_point(
    num_train: int, num_parameters: int, *, epsilon: float, features: bool, unit: bool = False
) -> StartingPoint:
    """The numbers of a first run.

    Args:
        num_train: N, images or persons.
        num_parameters: d, the trained parameters.
        epsilon: the budget of the run.
        features: whether one layer is trained on features.
        unit: whether these have the length 1, and not the square root of their number.

    Raises:
        ConfigurationError: epsilon cannot be reached, or is not a number above 0.
    """
    epochs = _FEATURE_EPOCHS if features else _EPOCHS
    batch_size = batch_size_for(num_train, at_most=LARGEST_FEATURE_BATCH if features else LARGEST_BATCH)
    shape = RunShape.of_length(
        num_train=num_train, expected_batch_size=batch_size, delta=delta_for(num_train), max_epochs=epochs
    )
    plan = shape.calibrate(epsilon)
    noise = noise_norm(plan, num_parameters)
    of_step = noise / math.sqrt(num_parameters) if unit else noise
    rate = learning_rate_for(of_step, features=features, unit=unit)
    limited = rate < learning_rate_for(0.0, features=features, unit=unit)
    return StartingPoint(plan, epochs, num_parameters, rate, limited_by_noise=limited)


def delta_for(num_train: int) -> float:
    """The largest power of ten that is at most 1/(2N), as in the papers on CIFAR-10: 1e-5 for 50,000 images."""
    exponent = math.ceil(math.log10(2 * num_train) - 1e-9)
    return float(f"1e-{exponent}")


def batch_size_for(num_train: int, *, at_most: int) -> int:
    """A quarter of N in two significant digits, at least 1."""
    quarter = max(1, num_train // BATCH_SHARE)
    unit = 10 ** max(0, len(str(quarter)) - 2)
    return min(quarter // unit * unit, at_most)


def learning_rate_for(noise: float, *, features: bool, unit: bool = False) -> float:
    """The rate at which the noise of one step, without momentum, moves the weights by so much at most, in one digit."""
    move, highest = _UNIT_RATES if unit else _FEATURE_RATES if features else _RATES
    return float(f"{min(highest, move / max(noise, 1e-9)):.0e}")


def noise_norm(plan: PrivacyPlan, num_parameters: int) -> float:
    """nu over C, for flat clipping."""
    return plan.noise_norm(num_parameters=num_parameters, sensitivity=MAX_GRAD_NORM) / MAX_GRAD_NORM
