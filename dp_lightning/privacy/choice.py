"""The epsilon of a run that is chosen among several by a score: private selection (Papernot and Steinke 2022).

The number of runs K is drawn from a distribution, and each run takes its settings at random. The run with the best
score is released, and K is not. Let R(a) be the Renyi divergence of order a of one run, whatever its settings are. With
the mean m = E[K], what is released has at most the divergence

- where K follows a truncated negative binomial distribution with eta = 0 (the logarithmic one) and a
  parameter g, for any order b > 1 (Theorem 2):  R(a) + (1 - 1/b) R(b) + log(1/g) / b + log(m) / (a - 1);
- where K follows a Poisson distribution, and no run is released if K is zero, for any epsilon e with
  exp(e) <= 1 + 1/(a - 1), where a run is (e, d)-differentially private (Theorem 6):  R(a) + m d + log(m) / (a - 1).

The scores have to come from data of other people. Runs that fail count as the worst.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import ORDERS, Run, delta_of, divergences_of, epsilon_of

Distribution = Literal["logarithmic", "poisson"]


def epsilon_of_choice(
    runs: Sequence[Sequence[Run]], *, expected_runs: float, delta: float, distribution: Distribution = "logarithmic"
) -> float:
    """Epsilon of the chosen run.

    Args:
        runs: the rounds of a run with each of the settings.
        expected_runs: E[K], at least 1, above 1 for the logarithmic distribution.
        delta: of the result.
        distribution: of K.

    Raises:
        ConfigurationError: for another number of runs.
    """
    if not 1 <= expected_runs <= 1e6:
        raise ConfigurationError(f"The expected number of runs must be from 1 to 1e6; got {expected_runs}.")
    one = np.max([divergences_of(each) for each in runs], axis=0)
    orders = np.array(ORDERS)
    further = np.log(expected_runs) / (orders - 1)
    if distribution == "poisson":
        at = np.log1p(1 / (orders - 1))
        bound = one + further + expected_runs * np.array([delta_of(one, epsilon) for epsilon in at])
    else:
        parameter = logarithmic_parameter(expected_runs)
        bound = one + further + np.min((1 - 1 / orders) * one + math.log(1 / parameter) / orders)
    return epsilon_of(bound, delta)


def logarithmic_parameter(expected_runs: float) -> float:
    """g of the logarithmic distribution with this mean, (1/g - 1) / log(1/g)."""
    if expected_runs <= 1:
        raise ConfigurationError(
            "The expected number of runs must be above 1 where it has the logarithmic distribution."
        )
    return math.exp(-brentq(lambda log: math.expm1(log) / log - expected_runs, 1e-9, 40.0, xtol=1e-14))


def draw_number(expected_runs: float, distribution: Distribution, generator: np.random.Generator) -> int:
    """K, by a generator with a secret key; 0 is possible for Poisson alone."""
    if distribution == "poisson":
        return int(generator.poisson(expected_runs))
    return int(generator.logseries(1 - logarithmic_parameter(expected_runs)))
