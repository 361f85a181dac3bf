"""What releases reveal about the mechanism that made them: a lower bound on epsilon, and tests of the noise.

A release under sampling probability 1 is a sum of clipped gradients plus N(0, (sigma S)^2 I). A canary is an example
whose gradient has a direction of its own. The score of a canary is the released sum along that direction, over sigma S:
N(0, 1) for one that did not take part, and N(1/sigma, 1) for one that did. T steps add up to sqrt(T)/sigma = mu. The
two normals are what mu-Gaussian differential privacy means (Dong, Roth and Su 2022), so true and false positive rates
of a threshold bound mu from below,

    mu >= Phi^-1(true positive rate) - Phi^-1(false positive rate),

and mu gives epsilon (Nasr et al. 2023). The rates of many canaries at once are bounded by Clopper and Pearson 1934.
This takes their scores as independent, which they are as far as the noise is. `NoiseTests` tests that by itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq
from torch import Tensor

# Noise kept for the comparisons of steps and of tensors: in all, and of one tensor.
_KEPT, _KEPT_OF_ONE = 2**20, 2**15
# Values whose distribution is compared with the normal one.
_SHAPE = 100_000


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of mu-Gaussian differential privacy (Dong, Roth and Su 2022, corollary 1)."""
    above = stats.norm.cdf(-epsilon / mu + mu / 2)
    return float(above - math.exp(epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which mu-Gaussian differential privacy has this delta; 0 for mu of at most 0."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    # The tail bound of the privacy loss, which is N(mu^2 / 2, mu^2).
    high = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, high))


def mu_lower_bound(
    included: NDArray[np.float64], excluded: NDArray[np.float64], thresholds: Sequence[float], *, alpha: float
) -> float:
    """The largest mu that the scores prove; it is above the true one with probability at most ``alpha``.

    Args:
        included, excluded: Scores of the canaries that took part, and of those that did not.
        thresholds: Thresholds that are fixed before the scores are known.
        alpha: Error probability over all thresholds and both rates.
    """
    each = alpha / (2 * len(thresholds))
    bounds = [-math.inf]
    for threshold in thresholds:
        hits, alarms = int((included > threshold).sum()), int((excluded > threshold).sum())
        low = stats.binomtest(hits, len(included), alternative="greater").proportion_ci(1 - each).low
        high = stats.binomtest(alarms, len(excluded), alternative="less").proportion_ci(1 - each).high
        bounds.append(float(stats.norm.ppf(low) - stats.norm.ppf(high)))
    return max(bounds)


@dataclass(frozen=True)
class NoiseTest:
    """One test of the noise. Numbers that are not finite have a p-value of zero.

    Attributes:
        kind: Kind of the test, "size", "shape", "steps" or "tensors".
        subject: Tensor, step or pair of them that was tested.
        observed: Standard deviation over the claimed one, or a correlation.
        p_value: Probability of something at least as far off, two-sided, if the claim is true.
    """

    kind: str
    subject: str
    observed: float
    p_value: float


class NoiseTests:
    """Tests of noise that is claimed to be standard normal and independent.

    * size: the sum of squares of each tensor, and of all, is chi-squared.
    * shape: the empirical distribution is the normal one (Kolmogorov and Smirnov).
    * steps: no correlation between a step and the next one in any tensor, nor between any two steps.
    * tensors: no correlation between two tensors.

    A correlation is tested by the inner product with the other vector over the length of that vector, which is exactly
    N(0, 1) whatever the vector is.
    """

    def __init__(self) -> None:
        self._squares: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, Tensor] = {}
        self._next_to: dict[str, list[tuple[float, float]]] = {}
        self._kept: dict[str, list[Tensor]] = {}

    def add(self, noise: Mapping[str, Tensor]) -> None:
        """Take the noise of one more step, by tensor, over its claimed standard deviation."""
        total = sum(tensor.numel() for tensor in noise.values())
        share = min(1.0, _KEPT / total)
        for name, tensor in noise.items():
            values = tensor.detach().flatten().to("cpu", torch.float64)
            self._squares[name] = self._squares.get(name, 0.0) + float(values.square().sum())
            self._counts[name] = self._counts.get(name, 0) + len(values)
            if name in self._last:
                self._next_to.setdefault(name, []).append(_correlation(values, self._last[name].double()))
            self._last[name] = values.float()
            keep = max(math.ceil(share * len(values)), min(len(values), _KEPT_OF_ONE // 8))
            self._kept.setdefault(name, []).append(values[:keep].float())

    def __len__(self) -> int:
        """How many tests there will be."""
        tensors, steps = len(self._kept), len(next(iter(self._kept.values()), ()))
        return 2 * tensors + 2 + math.comb(steps, 2) + math.comb(tensors, 2)

    def results(self) -> Iterator[NoiseTest]:
        """All tests."""
        for name, count in self._counts.items():
            yield _size(name, self._squares[name], count)
        yield _size("all tensors", sum(self._squares.values()), sum(self._counts.values()))
        kept = torch.cat([part for parts in self._kept.values() for part in parts])
        values = kept[:: max(len(kept) // _SHAPE, 1)].double().numpy()
        p_value = float(stats.kstest(values, "norm").pvalue) if np.isfinite(values).all() else 0.0
        yield NoiseTest("shape", "all tensors", float(values.std()), p_value)
        for name, found in self._next_to.items():
            cosines, scores = zip(*found, strict=True)
            # Each score is N(0, 1) whatever the later steps are, so that they are independent.
            yield NoiseTest("steps", name, sum(cosines) / len(found), _two_sided(sum(scores) / math.sqrt(len(found))))
        steps = [torch.cat(parts).double() for parts in zip(*self._kept.values(), strict=True)]
        for (one, earlier), (other, later) in combinations(enumerate(steps, start=1), 2):
            yield _between("steps", f"steps {one} and {other}", later, earlier)
        heads = {name: torch.stack([part[:_KEPT_OF_ONE] for part in parts]) for name, parts in self._kept.items()}
        for (one_name, first), (other_name, second) in combinations(heads.items(), 2):
            width = min(first.shape[1], second.shape[1])
            pair = second[:, :width].flatten().double(), first[:, :width].flatten().double()
            yield _between("tensors", f"{one_name} and {other_name}", *pair)


def _size(subject: str, squares: float, count: int) -> NoiseTest:
    tails = stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count)
    p_value = min(1.0, 2 * float(min(tails))) if math.isfinite(squares) else 0.0
    return NoiseTest("size", subject, math.sqrt(squares / count), p_value)


def _between(kind: str, subject: str, values: Tensor, other: Tensor) -> NoiseTest:
    cosine, score = _correlation(values, other)
    return NoiseTest(kind, subject, cosine, _two_sided(score))


def _correlation(values: Tensor, other: Tensor) -> tuple[float, float]:
    """The cosine of two vectors, and their inner product over the length of the other; zero for a vector of zeros."""
    product, length = float(values @ other), float(other.norm())
    return product / (length * float(values.norm()) or 1.0), product / (length or 1.0)


def _two_sided(score: float) -> float:
    return 2 * float(stats.norm.sf(abs(score))) if math.isfinite(score) else 0.0
