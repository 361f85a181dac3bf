"""Momentum and temporal filters: estimates of the gradient from the noisy gradients of several steps.

Momentum, for optimizers whose update is not linear in it. Heavy-ball (Polyak 1964), as in torch.optim.SGD, with g_t the
privatized gradient:

    m_t = beta m_{t-1} + g_t,                  output m_t.

Exponential average with Nesterov's look-ahead, as in Muon (Jordan et al. 2024):

    m_t = beta m_{t-1} + (1 - beta) g_t,       output (1 - beta) g_t + beta m_t.

Both start from m_0 = 0.

Low pass (DOPPLER, Zhang et al. 2024), with m_t the output:

    m_t = - sum_{tau=1..n_a} a_tau m_{t-tau} + sum_{tau=0..n_b} b_tau g_{t-tau},

where everything before the first step is zero. Bias correction divides m_t by c_t, the response of the same
recursion to a constant 1.

Scalar Kalman filter (the filter part of DiSK, Zhang et al. 2025), with g^_t the estimate and K_t the gain:

    g^_t = (1 - K_t) g^_{t-1} + K_t g_t.

K is constant, or follows from the ratio Q/R of process to measurement noise:
K = P / (P + R), then P <- (1 - K) P + Q.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear, Memory
from dp_lightning.postprocess.transform import AppliesTo, Where

T = TypeVar("T")  # a tensor, or a public number


class Momentum(EntrywiseLinear):
    """Momentum on the privatized gradient.

    Args:
        beta: decay in [0, 1).
        kind: "heavy_ball" (Polyak 1964) or "ema_nesterov" (Jordan et al. 2024).
    """

    has_momentum = has_memory = True

    def __init__(
        self,
        beta: float = 0.9,
        *,
        kind: Literal["heavy_ball", "ema_nesterov"] = "heavy_ball",
        applies_to: AppliesTo = "matrices",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to=applies_to, **where)
        if not 0 <= beta < 1:
            raise ConfigurationError(f"Momentum: beta must lie in [0, 1), got {beta}")
        if kind not in ("heavy_ball", "ema_nesterov"):
            raise ConfigurationError(f"Momentum: kind must be 'heavy_ball' or 'ema_nesterov', got {kind!r}")
        self.beta = beta
        self.kind = kind

    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        previous = memory.entries["momentum"] if memory.entries else torch.zeros_like(value)
        if self.kind == "heavy_ball":
            momentum = self.beta * previous + value
            return momentum, Memory({"momentum": momentum})
        momentum = self.beta * previous + (1 - self.beta) * value
        return (1 - self.beta) * value + self.beta * momentum, Memory({"momentum": momentum})


class LowPass(EntrywiseLinear):
    """A linear recursive filter of the privatized gradients. The default is m <- 0.9 m + 0.1 g.

    An exponential average with decay beta is a = (-beta,), b = (1 - beta,).

    Args:
        a: (a_1, ..., a_{n_a}): feedback of past outputs, with the sign of the recursion above. May be empty.
        b: (b_0, ..., b_{n_b}): weights of the present and past gradients.
        bias_correction: divide by the filter's response to a constant 1, so that a constant gradient comes
            out unchanged from the first step on (1 - beta^t for the exponential average).

    Raises:
        ConfigurationError: coefficients that are not finite, an unstable recursion (a root of
            z^n + a_1 z^(n-1) + ... + a_n on or outside the unit circle), or b without weight for the present gradient.
    """

    has_memory = True

    def __init__(
        self,
        *,
        a: tuple[float, ...] = (-0.9,),
        b: tuple[float, ...] = (0.1,),
        bias_correction: bool = False,
        applies_to: AppliesTo = "matrices",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to=applies_to, **where)
        if not all(math.isfinite(value) for value in (*a, *b)):
            raise ConfigurationError(f"LowPass: a and b must be finite, got a={a}, b={b}")
        if not b or b[0] == 0 or sum(b) == 0:
            raise ConfigurationError(
                "LowPass: b must start with a nonzero weight and have a nonzero sum, or the filter blocks a "
                f"constant gradient; got b={b}"
            )
        if (radius := max(map(abs, np.roots([1.0, *a])), default=0.0)) >= 1:
            raise ConfigurationError(
                f"LowPass: a={a} is unstable (largest root {radius:.3g}, must be below 1); the noise "
                "would grow without bound. The sign is m_t = -a_1 m_{t-1} + ...: a decay of 0.9 is a=[-0.9]"
            )
        self.a = tuple(a)
        self.b = tuple(b)
        self.bias_correction = bias_correction

    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        filtered, entries = self._recursion(value, memory.entries, zero=torch.zeros_like(value))
        if not self.bias_correction:
            return filtered, Memory(entries)
        response, numbers = self._recursion(1.0, memory.numbers, zero=0.0)
        return filtered / response, Memory(entries, numbers)

    def _recursion(self, value: T, history: Mapping[str, T], *, zero: T) -> tuple[T, dict[str, T]]:
        """One step of the recursion on `value`; the history is in output_1, ... and input_1, ..."""
        outputs: list[T] = [history.get(f"output_{i}", zero) for i in range(1, len(self.a) + 1)]
        inputs: list[T] = [value, *(history.get(f"input_{i}", zero) for i in range(1, len(self.b)))]
        result: Any = zero
        pasts: tuple[Any, ...] = *outputs, *inputs
        for weight, past in zip((*(-x for x in self.a), *self.b), pasts, strict=True):
            result = result + weight * past
        new_outputs, new_inputs = [result, *outputs][: len(self.a)], inputs[: len(self.b) - 1]
        new = {f"output_{i}": past for i, past in enumerate(new_outputs, start=1)}
        return result, new | {f"input_{i}": past for i, past in enumerate(new_inputs, start=1)}


class Kalman(EntrywiseLinear):
    """Scalar Kalman filter of the privatized gradients; the first estimate is the first gradient.

    Starting from the first gradient is the limit of no prior knowledge, P = infinity: K_1 = 1, and then
    P = R + Q. Give exactly one of `gain` and `process_to_measurement_ratio`.

    Shanmugam et al. 2026 list kappa = 1.5, which cannot be a gain: white noise leaves the filter with
    K / (2 - K) times its variance, three times at K = 1.5. Read as Q/R = 1.5 it gives K = 0.686, next to
    DiSK's own 0.7.

    Args:
        gain: constant K in (0, 1].
        process_to_measurement_ratio: Q/R, positive. The gain falls from 1 to the positive root of
            K^2 + (Q/R) K - Q/R = 0.

    Raises:
        ConfigurationError: both or neither are given, or one is outside its range.
    """

    has_memory = True

    def __init__(
        self,
        *,
        gain: float | None = None,
        process_to_measurement_ratio: float | None = None,
        applies_to: AppliesTo = "matrices",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to=applies_to, **where)
        ratio = process_to_measurement_ratio
        if (gain is None) == (ratio is None):
            raise ConfigurationError("Kalman: give exactly one of gain and process_to_measurement_ratio")
        if gain is not None and not 0 < gain <= 1:
            raise ConfigurationError(
                f"Kalman: gain must lie in (0, 1], got {gain}. A gain above 1 amplifies the noise (its "
                f"variance threefold at 1.5). If {gain} is the ratio of process to measurement noise, as "
                "kappa = 1.5 in Shanmugam et al. 2026 is read here, set process_to_measurement_ratio "
                "instead: 1.5 settles at a gain of 0.686"
            )
        if ratio is not None and not (ratio > 0 and math.isfinite(ratio)):
            raise ConfigurationError(f"Kalman: process_to_measurement_ratio must be positive and finite, got {ratio}")
        self.gain = gain
        self.process_to_measurement_ratio = ratio

    def step(self, value: Tensor, memory: Memory, *, noise: float | None, shape: torch.Size) -> tuple[Tensor, Memory]:
        gain, numbers = self._gain(memory.numbers)
        estimate = (1 - gain) * memory.entries["estimate"] + gain * value if memory.entries else value
        return estimate, Memory({"estimate": estimate}, numbers)

    def _gain(self, numbers: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """The gain of this step, and what the next one needs: the variance of the error, in units of R."""
        if self.gain is not None:
            return self.gain, {}
        assert self.process_to_measurement_ratio is not None
        gain = posterior = 1.0
        if numbers:
            variance = numbers["error_variance"]
            gain = variance / (variance + 1)
            posterior = (1 - gain) * variance
        return gain, {"error_variance": posterior + self.process_to_measurement_ratio}
