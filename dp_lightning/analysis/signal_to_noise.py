"""The signal-to-noise ratio ||G|| / ||N|| of a privatized gradient, from public numbers and the gradient itself.

A privatized gradient of d parameters is G~ = G + N, where N has independent N(0, s^2) entries and s = sigma S / B is
known. Since E ||G~||^2 = ||G||^2 + s^2 d,

    snr^2 = ||G||^2 / (s^2 d) = E ||G~||^2 / (s^2 d) - 1.

One step estimates snr^2 without bias, with a standard deviation of sqrt(2/d + 4 snr^2/d). Only the privatized gradient
enters, so the estimate is post-processing. The same holds for the gradient of one parameter tensor, whose entries have
noise of the same level.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class SnrMeter:
    """Averages snr^2 over steps; the root of the average is the signal-to-noise ratio.

    The average is clipped at zero, not its terms: if noise dominates, clipping each term would report the size of the
    fluctuations as a signal.

    One meter measures one gradient, or several beside each other: then the squared norms and the numbers of parameters
    are tensors of shape (k,), and so is the average.
    """

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        #: Steps since the start or the last reset.
        self.count = 0

    def update(self, squared_norm: float | Tensor, *, noise_level: float, num_parameters: int | Tensor) -> None:
        """Take the gradient of one step.

        Args:
            squared_norm: ||G~||^2 over all parameters, or of each of k gradients; a tensor stays on its device until
                ``snr`` or ``snrs`` is read.
            noise_level: s, above zero.
            num_parameters: d, or that of each gradient.
        """
        if isinstance(self._sum, Tensor) and isinstance(squared_norm, Tensor):
            self._sum = self._sum.to(squared_norm.device)  # one that was loaded is on the CPU
        self._sum = self._sum + squared_norm / (noise_level**2 * num_parameters) - 1
        self.count += 1

    @property
    def snr(self) -> float:
        """The ratio of one gradient over the steps since the start or the last reset; nan before the first."""
        return self._ratio(float(self._sum))

    @property
    def snrs(self) -> list[float]:
        """The ratio of each of k gradients; empty before the first step."""
        return [self._ratio(total) for total in self._totals()]

    def _ratio(self, total: float) -> float:
        return math.sqrt(max(0.0, total / self.count)) if self.count else math.nan

    def _totals(self) -> list[float]:
        return self._sum.tolist() if isinstance(self._sum, Tensor) and self._sum.dim() else []

    def reset(self) -> None:
        """Forget the steps."""
        self._sum, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """The sum, or the list of k sums, and the number of their terms."""
        return {"sum": self._totals() or float(self._sum), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        total = state["sum"]
        self._sum, self.count = torch.tensor(total) if isinstance(total, list) else total, int(state["count"])
