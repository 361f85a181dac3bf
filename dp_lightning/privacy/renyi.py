"""Renyi divergences of one step of the sampled Gaussian mechanism (Mironov, Talwar and Zhang 2019, section 3.3).

The divergence of order a > 1 is R(a) = log A(a) / (a - 1), where

    A(a) = E[(1 - q + q exp((2z - 1) / (2 sigma^2)))^a],    z ~ N(0, sigma^2).

Of an integer order A is a finite sum of positive terms. Of another one it is an integral of a smooth function, which
the trapezoidal rule gives to the accuracy of float64. Opacus sums series term by term, which for large q makes
a plan take seconds.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

# Below this noise the integrand's steepest part, sigma^2 wide, would need millions of points.
_SMALLEST_NOISE_OF_INTEGRALS = 0.05
# The points are half of the integrand's smallest scale apart and reach 10 standard deviations beyond its two peaks:
# both errors are below 1e-16 of the result.
_POINTS_PER_SCALE, _DEVIATIONS = 2, 10
# Added to log A of an integral, of 1 and of itself, so that rounding never makes it smaller.
_ROUNDING = 1e-14


def divergences(noise_multiplier: float, sample_rate: float, orders: Sequence[float]) -> np.ndarray:
    """R(a) of one step at each of ``orders``: float64, infinity where it is not computed or float64 cannot hold it.

    Args:
        noise_multiplier: sigma, above 0. Below 0.05 no divergence is computed of an order that is no integer.
        sample_rate: q, in (0, 1].
        orders: above 1; integers among them up to 1024.
    """
    sigma, q, a = noise_multiplier, sample_rate, np.array(orders, dtype=np.float64)
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        if q == 1:
            return a / 2 / sigma / sigma
        whole = a == np.floor(a)
        logs = np.full_like(a, np.inf)
        logs[whole] = [_log_of_sum(sigma, q, int(order)) for order in a[whole]]
        if sigma >= _SMALLEST_NOISE_OF_INTEGRALS:
            logs[~whole] = _log_of_integral(sigma, q, a[~whole])
        return logs / (a - 1)


def _log_of_sum(sigma: float, q: float, order: int) -> float:
    """log A of an integer order: A - 1 is the sum of C(a, i) q^i (1 - q)^(a - i) (exp(i (i - 1) / (2 sigma^2)) - 1)."""
    i = np.arange(2, order + 1, dtype=np.float64)
    exponents = i * (i - 1) / 2 / sigma / sigma
    weights = np.log(special.binom(order, i)) + i * np.log(q) + (order - i) * np.log1p(-q)
    terms = weights + exponents + np.log(-np.expm1(-exponents))
    return float(np.logaddexp(0.0, np.logaddexp.reduce(terms)))


def _log_of_integral(sigma: float, q: float, orders: np.ndarray) -> np.ndarray:
    """log A of any orders, by the trapezoidal rule."""
    step = sigma * min(1.0, sigma) / _POINTS_PER_SCALE
    reach = _DEVIATIONS * sigma
    z = np.arange(-reach, orders.max(initial=1.0) + reach + step, step)
    log_density = -((z / sigma) ** 2) / 2 - np.log(sigma / step) - np.log(2 * np.pi) / 2
    log_ratio = np.logaddexp(np.log1p(-q), np.log(q) + (z - 0.5) / sigma / sigma)
    found = special.logsumexp(log_density + orders[:, None] * log_ratio, axis=1)
    bound: np.ndarray = found + _ROUNDING * (1 + found)
    return bound
