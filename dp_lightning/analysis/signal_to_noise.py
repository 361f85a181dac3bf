"""The signal-to-noise ratio ||G|| / ||N|| of a privatized gradient, from public numbers and the gradient itself.

A privatized gradient of d parameters is G~ = G + N, where N has independent N(0, s^2) entries and s = sigma S / B is
known. Since E ||G~||^2 = ||G||^2 + s^2 d,

    snr^2 = ||G||^2 / (s^2 d) = E ||G~||^2 / (s^2 d) - 1.

One step estimates snr^2 without bias, with a standard deviation of sqrt(2/d + 4 snr^2/d). Only the privatized gradient
enters, so the estimate is post-processing.
"""

import math

from torch import Tensor


class SnrMeter:
    """Averages snr^2 over steps; the root of the average is the signal-to-noise ratio.

    The average is clipped at zero, not its terms: if noise dominates, clipping each term would report the size of the
    fluctuations as a signal.
    """

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        #: Steps since the start or the last reset.
        self.count = 0

    def update(self, squared_norm: float | Tensor, *, noise_level: float, num_parameters: int) -> None:
        """Take the gradient of one step.

        Args:
            squared_norm: ||G~||^2 over all parameters; a tensor stays on its device until ``snr`` is read.
            noise_level: s, above zero.
            num_parameters: d.
        """
        self._sum = self._sum + squared_norm / (noise_level**2 * num_parameters) - 1
        self.count += 1

    @property
    def snr(self) -> float:
        """The ratio over the steps since the start or the last reset; nan before the first."""
        return math.sqrt(max(0.0, float(self._sum) / self.count)) if self.count else math.nan

    def reset(self) -> None:
        """Forget the steps."""
        self._sum, self.count = 0.0, 0

    def state_dict(self) -> dict[str, float]:
        """The sum and the number of its terms."""
        return {"sum": float(self._sum), "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state_dict``."""
        self._sum, self.count = state["sum"], int(state["count"])
