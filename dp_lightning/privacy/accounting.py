"""What a sequence of subsampled Gaussian steps spends: epsilon at a given delta, and the ledger of steps.

One step draws each example with probability q (Poisson), adds N(0, sigma^2 S^2 I) to a sum of L2
sensitivity S, and releases the result. Neighbouring data sets differ by adding or removing one example. T
such steps are (epsilon, delta)-DP with an epsilon that three accountants bound from above:

- ``prv``: numerical composition of the privacy loss (Gopi, Lee and Wutschitz 2021), by Opacus; the upper end
  of its interval. It composes the loss of removing an example; that of adding one was never larger where the
  two were compared through ``pld``, which takes the larger of both.
- ``rdp``: Renyi DP of the sampled Gaussian (``renyi.py``), converted by Theorem 21 of Balle et al. 2020.
- ``pld``: privacy loss distributions with a pessimistic discretisation (Doroshenko et al. 2022), by
  dp-accounting; optional.

The Renyi bound is cheap. It caps the other two and stands in for them wherever their float64 arithmetic
cannot be trusted; where even its own numbers overflow, epsilon is infinite. An accountant that fails never
yields a smaller number.
"""

import functools
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dp_lightning.errors import BudgetError, ConfigurationError
from dp_lightning.privacy import renyi
from dp_lightning.privacy.ranges import check_count, check_delta, check_noise_multiplier, is_number

ACCOUNTANTS = ("prv", "rdp", "pld")

Run = tuple[float, float, int]
"""``(noise_multiplier, sample_rate, count)``: `count` rounds with the same noise and rate. A round is one logical step,
or with correlated noise b steps, of which an example takes part in one (``bands``)."""

#: Opacus' grid, widened: orders near 1 matter for epsilon above 100, large ones for epsilon below 0.1. The binomial
#: coefficients of orders above 1024 overflow float64.
ORDERS = (
    [1.001, 1.005, 1.01, 1.02, 1.05]
    + [1 + x / 10 for x in range(1, 100)]
    + list(range(11, 64))
    + [64, 80, 96, 128, 192, 256, 384, 512, 768, 1024]
)
# The FFT of a composition has an absolute error of about T * 2.2e-16. Compared with the PLD accountant the
# epsilon of sigma 1, q 0.01, T 1000 is sound at delta 1e-10 and too small at 1e-12; a factor of 1000 keeps
# clear of that.
_FFT_MARGIN = 1000 * np.finfo(np.float64).eps
_SMALLEST_FFT_DELTA = 1e-11
# Grid points of the PRV's discretisation, all runs together: about one second and 200 MB.
_MAX_PRV_POINTS = 2**21
# The most points that Opacus adds to a grid, so that zero is one of them.
_ENDS = 3
# Gopi et al.'s truncation bound, as Opacus implements it, holds for errors below 1.
_MAX_PRV_ERROR = 0.5


def compose(runs: Iterable[Run], *, delta: float, accountant: str = "prv") -> float:
    """Epsilon of all `runs` together; their order does not matter.

    Args:
        runs: steps with noise 0 give infinity, and no step gives 0.
        delta: in (0, 1).
        accountant: "prv", "rdp" or "pld".

    Raises:
        ConfigurationError: a value is outside its range, or the accountant is unknown or not installed.
    """
    check_accountant(accountant)
    check_delta(delta)
    totals = _totals(_check_run(*run) for run in runs if run[2] != 0)
    merged = tuple((sigma, q, count) for (sigma, q), count in totals.items())
    if not merged:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in merged):
        return math.inf
    bound = _rdp_epsilon(merged, delta)
    if accountant == "prv":
        return min(bound, _prv_epsilon(merged, delta, bound))
    if accountant == "pld":
        return min(bound, _pld_epsilon(merged, delta, bound))
    return bound


def compose_all(runs: Sequence[Run], *, delta: float) -> dict[str, float | None]:
    """Epsilon by every accountant; "pld" is None where dp-accounting is not installed."""
    return {
        name: None if name == "pld" and not pld_installed() else compose(runs, delta=delta, accountant=name)
        for name in ACCOUNTANTS
    }


def best_guess(epsilon: float, delta: float) -> float:
    """The largest probability with which anybody can tell whether one example was in the training set.

    For an example that is in it with probability 1/2, and somebody who knows all others: (e^epsilon + delta) /
    (1 + e^epsilon), since the two error rates a, b of a test satisfy a + e^epsilon b >= 1 - delta and the same
    with a and b exchanged (Kairouz, Oh and Viswanath 2015).
    """
    return 1.0 - (1.0 - delta) * math.exp(-epsilon) / (1.0 + math.exp(-epsilon))


def pld_installed() -> bool:
    """Whether the optional PLD accountant can be used."""
    return importlib.util.find_spec("dp_accounting") is not None


def check_accountant(name: str) -> None:
    """Raise ConfigurationError for an accountant that is unknown or not installed."""
    if name not in ACCOUNTANTS:
        raise ConfigurationError(f"accountant must be one of {', '.join(ACCOUNTANTS)}; got {name!r}.")
    if name == "pld" and not pld_installed():
        raise ConfigurationError(
            "accountant 'pld' needs dp-accounting: pip install 'dp-lightning[pld]', or choose 'prv' or 'rdp'."
        )


class Ledger:
    """The record of the logical steps that were taken, and of their rounds, which cost epsilon. It can only grow.

    A round counts as soon as its first step is taken.

    Its state has plain Python types, so that a checkpoint that holds it loads with ``torch.load(weights_only=True)``.

    Attributes:
        totals: how many rounds were begun with each ``(noise_multiplier, sample_rate)``, without earlier runs.
        num_steps: how many logical steps were taken, without earlier runs.
        earlier: rounds that the weights had taken before, in other runs, by the runs' names. Epsilon counts them.
    """

    def __init__(self) -> None:
        self.totals: Counter[tuple[float, float]] = Counter()
        self.num_steps = 0
        self.earlier: dict[str, tuple[Run, ...]] = {}

    @property
    def runs(self) -> tuple[Run, ...]:
        """``(noise_multiplier, sample_rate, count)`` of each kind of round, in the order of their first ones."""
        return tuple((*kind, count) for kind, count in self.totals.items())

    @property
    def spent(self) -> tuple[Run, ...]:
        """``runs``, and the rounds of earlier runs."""
        return *(run for runs in self.earlier.values() for run in runs), *self.runs

    def count_earlier(self, runs: Mapping[str, Sequence[Run]]) -> None:
        """Add the steps of earlier runs, by the runs' names; of a run that is known, the longer record counts.

        Raises:
            ConfigurationError: for steps outside their ranges.
        """
        for name, steps in runs.items():
            checked = tuple(_check_run(*run) for run in steps)
            known = self.earlier.get(str(name), ())
            if sum(run[2] for run in checked) > sum(run[2] for run in known):
                self.earlier[str(name)] = checked

    def record(self, *, noise_multiplier: float, sample_rate: float, place: int = 0) -> None:
        """Add one logical step, the ``place``-th of its round, from 0 on.

        Raises:
            ConfigurationError: for values outside their ranges.
        """
        begun = _totals([_check_run(noise_multiplier, sample_rate, 1)])
        self.totals += begun if place == 0 else Counter()
        self.num_steps += 1

    def epsilon(self, *, delta: float, accountant: str = "prv") -> float:
        """Epsilon spent by the recorded steps and those of earlier runs at `delta`."""
        return compose(self.spent, delta=delta, accountant=accountant)

    def state_dict(self) -> dict[str, Any]:
        """The runs as lists ``[noise_multiplier, sample_rate, count]`` under "runs"; "earlier" has more by name."""
        earlier = {name: [list(run) for run in runs] for name, runs in self.earlier.items()}
        return {"runs": [list(run) for run in self.runs], "steps": self.num_steps, "earlier": earlier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the record by a saved one that holds at least the same steps. No earlier run is forgotten.

        Raises:
            ConfigurationError: the state is not one that `state_dict` can have written.
            BudgetError: the state lacks steps that this ledger has recorded.
        """
        loaded = Ledger()
        try:
            loaded.totals = _totals(_check_run(*run) for run in state["runs"])
            loaded.num_steps = int(state["steps"])
            loaded.count_earlier(state.get("earlier", {}))
            if not min(loaded.num_steps, 1) <= loaded.totals.total() <= loaded.num_steps:
                raise ConfigurationError(f"{loaded.totals.total()} rounds do not have {loaded.num_steps} steps.")
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise ConfigurationError(f"The saved ledger is malformed: {error}") from None
        if not self.totals <= loaded.totals or self.num_steps > loaded.num_steps:
            raise BudgetError(
                f"The saved ledger holds {loaded.num_steps} steps and lacks some of the {self.num_steps} "
                "already taken. A ledger cannot forget steps: resume from a later checkpoint, or start a "
                "new process."
            )
        self.totals, self.num_steps = loaded.totals, loaded.num_steps
        self.count_earlier(loaded.earlier)


def _totals(runs: Iterable[Run]) -> Counter[tuple[float, float]]:
    totals: Counter[tuple[float, float]] = Counter()
    for sigma, q, count in runs:
        totals[sigma, q] += count
    return totals


def _check_run(noise_multiplier: float, sample_rate: float, count: int) -> Run:
    check_noise_multiplier(noise_multiplier)
    if not is_number(sample_rate) or not 0 < sample_rate <= 1:
        raise ConfigurationError(f"sample_rate must be above 0 and at most 1; got {sample_rate!r}.")
    check_count("the number of steps", count)
    return float(noise_multiplier), float(sample_rate), count


def _rdp_epsilon(runs: Sequence[Run], delta: float) -> float:
    return epsilon_of(divergences_of(runs), delta)


def divergences_of(runs: Iterable[Run]) -> list[float]:
    """The Renyi divergence R(a) of all ``runs`` together, at each of ``ORDERS``."""
    steps = [(count, _divergences(sigma, q)) for sigma, q, count in runs]
    return [sum(count * divergences[place] for count, divergences in steps) for place in range(len(ORDERS))]


def epsilon_of(divergences: Sequence[float], delta: float) -> float:
    """min over a of R(a) + log(1 - 1/a) - (log delta + log a)/(a-1) (Balle et al. 2020), at least 0."""
    best = math.inf
    for order, divergence in zip(ORDERS, divergences, strict=True):
        bound = divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, bound)
    return float(max(0.0, best))


def delta_of(divergences: Sequence[float], epsilon: float) -> float:
    """The delta at which the same bound gives ``epsilon``, at most 1."""
    logs = [
        (order - 1) * (divergence + math.log1p(-1 / order) - epsilon) - math.log(order)
        for order, divergence in zip(ORDERS, divergences, strict=True)
    ]
    return math.exp(min(0.0, *logs))


@functools.lru_cache(maxsize=1024)
def _divergences(sigma: float, q: float) -> tuple[float, ...]:
    """The Renyi divergence R(a) of one step at each of ``ORDERS``."""
    # Where that of one order is beyond float64, the others bound epsilon without it.
    found = renyi.divergences(sigma, q, ORDERS).tolist()
    return tuple(math.inf if math.isnan(divergence) else divergence for divergence in found)


@functools.lru_cache(maxsize=64)
def _prv_epsilon(runs: tuple[Run, ...], delta: float, rdp_bound: float) -> float:
    """The upper bound by Opacus' PRV, or infinity where float64 cannot carry it."""
    from opacus.accountants.analysis import prv  # it imports torch, which takes seconds

    num_steps = sum(count for _, _, count in runs)
    if delta < max(_SMALLEST_FFT_DELTA, _FFT_MARGIN * num_steps) or math.isinf(rdp_bound):
        return math.inf
    delta_error = delta / 1000
    try:
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            # Remark 5.6 of Gopi et al., with 3 more at each end, as they have it: Opacus' compute_safe_domain_size.
            tails = [_rdp_epsilon([(sigma, q, 1)], delta_error / (8 * num_steps)) for sigma, q, _ in runs]
            tail = max(_rdp_epsilon(runs, delta_error / 4), *tails)
            half_width = max(tail, _MAX_PRV_ERROR) + 3
            points_per_error = math.sqrt(num_steps * math.log(12 / delta_error) / 2)
            points = 2 * half_width * points_per_error * len(runs)
            # An error of 0.01; smaller for small epsilon, larger where the grid would grow too long.
            eps_error = max(0.01 * min(1.0, rdp_bound), points / (_MAX_PRV_POINTS - 2 * _ENDS))
            if not eps_error <= _MAX_PRV_ERROR:
                return math.inf
            domain = _domain(prv, half_width, spacing=eps_error / points_per_error)
            losses = [prv.PoissonSubsampledGaussianPRV(q, sigma) for sigma, q, _ in runs]
            cut = [prv.TruncatedPrivacyRandomVariable(loss, domain.t_min, domain.t_max) for loss in losses]
            total = prv.compose_heterogeneous(
                [prv.discretize(loss, domain) for loss in cut], [count for _, _, count in runs]
            )
            _, _, value = total.compute_epsilon(delta, delta_error, eps_error)
    except (ArithmeticError, ValueError, RuntimeError, IndexError):
        return math.inf
    # An upper end below its own error margin means that the estimate was negative.
    return max(float(value), eps_error) if not math.isnan(value) else math.inf


def _domain(prv: Any, half_width: float, *, spacing: float) -> Any:
    """Opacus' grid from -half_width to half_width, so much finer than ``spacing`` that its points are a power of two.

    An FFT of another length takes twice as long, and SciPy keeps the tables of the last 16 lengths: of this size, a
    gigabyte.
    """
    needed = math.ceil(2 * half_width / spacing) + _ENDS
    points = 1 << (needed - 1).bit_length()
    return prv.Domain.create_aligned(-half_width, half_width, half_width / ((points - _ENDS) / 2))


@functools.lru_cache(maxsize=64)
def _pld_epsilon(runs: tuple[Run, ...], delta: float, rdp_bound: float) -> float:
    """dp-accounting's pessimistic bound, or infinity where it fails."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    if math.isinf(rdp_bound):
        return math.inf
    # Its time goes with 1 / interval. Epsilon grows by about 0.2 steps interval^2, or by half the interval where it is
    # small: here by 1e-3 of itself at most. Coarser for a large epsilon, so that the grid stays near 100,000 points.
    steps = sum(count for _, _, count in runs)
    fine = min(1e-3, 1e-3 * rdp_bound, math.sqrt(5e-4 * rdp_bound / steps))
    interval = max(1e-4, fine, rdp_bound / 1e5)
    try:
        with np.errstate(all="ignore"):
            parts = [
                pld.from_gaussian_mechanism(
                    sigma, sampling_prob=q, value_discretization_interval=interval
                ).self_compose(count)
                for sigma, q, count in runs
            ]
            total = functools.reduce(lambda left, right: left.compose(right), parts)
            value = float(total.get_epsilon_for_delta(delta))
    except (ArithmeticError, ValueError, RuntimeError, IndexError):
        return math.inf
    return value if value >= 0 else math.inf
