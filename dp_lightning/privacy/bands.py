"""Noise that is correlated over steps, so that much of it cancels in the weights: banded matrix factorization.

With b bands, the noise on the sum of step t is sigma S y_t, with

    y_t = (z_t - sum over 0 < j < b of c_j y_{t-j}) / c_0,

independent standard normal z_t, and public coefficients c of Euclidean norm one. That is C y = z, where C is lower
triangular, Toeplitz, has b bands, and columns of norm at most one.

Formal guarantee (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", Theorem 4). Each example is in
one of b groups, by an independent uniform draw from the secret key, and step t draws from group t mod b alone, each
example of it with probability q = b B / N (``sampling``). Take one example and its group as given.

1. Let x_t be the clipped sum of step t over sigma S. Releasing x_t + y_t for all t is releasing C x + z, since C is
   public and has an inverse. The example changes x_t by a vector v_t of norm at most 1/sigma if it takes part in
   step t, and so changes rows t, ..., t+b-1 of C x by c_0 v_t, ..., c_{b-1} v_t. Together these have the norm of v_t.
2. Steps in which the example may take part are b apart, so that no row belongs to two of them. Given the releases
   before step t, on which v_t may depend, rows t, ..., t+b-1 are a Gaussian mechanism of noise multiplier sigma, which
   the example enters with probability q.
3. So T steps are at most ceil(T / b) rounds of a Poisson-subsampled Gaussian mechanism, composed adaptively. An
   average over the groups has at most the largest divergence among them, and no group has more rounds.

One more example shifts no other into another group, so that the neighbours are those of independent noise. A process
that goes on from a checkpoint begins a new block with fresh groups and z, whose rounds count anew.

The coefficients minimize the error that the noise leaves in the weights, averaged over steps, for weights that are the
sum of all updates at one learning rate. A schedule of the rate hardly matters: under a cosine to zero, coefficients for
a constant rate leave an error within 1 % of the best.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


@functools.lru_cache(maxsize=64)
def coefficients(bands: int, num_steps: int, response: tuple[float, ...] = (1.0,)) -> tuple[float, ...]:
    """The coefficients c with the smallest ``error``, of Euclidean norm one.

    Args:
        bands: b, their number.
        num_steps: T.
        response: as in ``error``.
    """
    start = [1.0]
    for k in range(1, bands):  # of the square root of the matrix of all sums, 1 / sqrt(1 - x)
        start.append(start[-1] * (2 * k - 1) / (2 * k))
    free = torch.tensor(start[1:], dtype=torch.float64, requires_grad=True)
    first = torch.ones(1, dtype=torch.float64)
    if bands > 1:
        search = torch.optim.LBFGS([free], max_iter=200, tolerance_change=1e-12, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            search.zero_grad()
            value = _squared_error(torch.cat([first, free]), num_steps, response).log()
            value.backward()
            return value

        with torch.enable_grad():
            search.step(loss)
    found = torch.cat([first, free.detach()])
    return tuple((found / found.norm()).tolist())


def error(chosen: Sequence[float], num_steps: int, response: Sequence[float] = (1.0,)) -> float:
    """Root of the mean squared error in each weight over T steps, where y has the scale of columns of norm one.

    Args:
        chosen: the coefficients, of any scale.
        num_steps: T.
        response: what the weights get of a gradient in its own step and in those after it, by momentum and filters.
    """
    return math.sqrt(_squared_error(torch.tensor(chosen, dtype=torch.float64), num_steps, response).item())


def deviations(chosen: Sequence[float], num_steps: int) -> list[float]:
    """Standard deviation of y in each of the first steps of a block."""
    found: list[float] = (
        _inverse(torch.tensor(chosen, dtype=torch.float64), num_steps).square().cumsum(0).sqrt().tolist()
    )
    return found


def _squared_error(chosen: Tensor, num_steps: int, response: Sequence[float]) -> Tensor:
    """With e(x) = |c| r(x) / (c(x) (1 - x)) for the response r, the mean over t of the sum of e_k^2 over k < t."""
    filtered = _product(_inverse(chosen, num_steps), chosen.new_tensor(response[:num_steps]), num_steps)
    times = torch.arange(num_steps, 0, -1, dtype=torch.float64)
    return chosen.square().sum() * (times * filtered.cumsum(0).square()).mean()


def _inverse(series: Tensor, length: int) -> Tensor:
    """The first coefficients of 1 / series(x), by Newton's iteration."""
    found = 1 / series[:1]
    while len(found) < length:
        size = min(2 * len(found), length)
        again = _product(_product(series[:size], found, size), found, size)
        found = 2 * pad(found, (0, size - len(found))) - again
    return found


def _product(left: Tensor, right: Tensor, length: int) -> Tensor:
    """The first coefficients of the product of two power series."""
    size = 1 << (len(left) + len(right)).bit_length()
    product: Tensor = torch.fft.irfft(torch.fft.rfft(left, size) * torch.fft.rfft(right, size), size)
    return product[:length]
