"""Renyi divergences against Opacus' series, a brute-force integral, and the bound where neither is used."""

import math
from itertools import pairwise

import numpy as np
import pytest
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import integrate

from dp_lightning.privacy import renyi

ORDERS = [1.001, 1.05, 1.3, 2, 2.5, 4.7, 10.9, 11, 40, 63, 256, 1024]


@pytest.mark.parametrize("sigma", [0.06, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("rate", [1e-6, 0.09, 0.97, 1.0])
def test_divergences_are_those_of_the_series(sigma, rate):
    expected = [compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=float(order)) for order in ORDERS]
    # The series stops at terms of e^-30 = 1e-13, and is divided by the order less 1.
    margin = 1e-12 / (np.array(ORDERS) - 1)
    found = renyi.divergences(sigma, rate, ORDERS)
    assert np.all(np.abs(found - expected) <= 1e-9 * np.array(expected) + margin)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"), [(0.7, 0.02, 1.2), (1.0, 0.3, 3.5), (2.0, 0.9, 10.9), (5.0, 0.1, 64)]
)
def test_divergences_are_the_integral(sigma, rate, order):
    def integrand(z):
        ratio = 1 - rate + rate * math.exp((2 * z - 1) / (2 * sigma**2))
        return math.exp(-(z**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi)) * (ratio**order - 1)

    ends = np.linspace(-12 * sigma, order + 12 * sigma, 40)
    moment = sum(integrate.quad(integrand, *part, epsabs=1e-15, epsrel=1e-13)[0] for part in pairwise(ends))
    assert renyi.divergences(sigma, rate, [order])[0] == pytest.approx(math.log1p(moment) / (order - 1), rel=1e-9)


def test_a_small_divergence_of_an_integer_order_keeps_its_digits():
    # q^2 a / (2 sigma^2) to first order, far below the distance of float64 numbers near 1.
    found = renyi.divergences(1e6, 1e-4, [2, 32])
    assert found == pytest.approx(1e-8 * np.array([2, 32]) / (2e12), rel=1e-6)


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.049])
@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.9])
def test_with_hardly_any_noise_only_integer_orders_bound_epsilon(sigma, rate):
    expected = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=7.0)
    assert renyi.divergences(sigma, rate, [1.1, 7, 10.9]) == pytest.approx([math.inf, expected, math.inf])
