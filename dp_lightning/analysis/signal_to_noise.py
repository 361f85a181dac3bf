"""The signal-to-noise ratio ||G|| / ||N|| of a privatized gradient, from public numbers and the gradient itself.

A privatized gradient of d parameters is G~ = G + N with N of independent N(0, s^2) entries, s = sigma S / B known. Since
E ||G~||^2 = ||G||^2 + s^2 d,

    snr^2 = ||G||^2 / (s^2 d) = E ||G~||^2 / (s^2 d) - 1.

One step estimates snr^2 without bias, with a standard deviation of sqrt(2/d + 4 snr^2/d). Only the privatized gradient
enters, so the estimate is post-processing.
"""

import math


def noise_norm(*, noise_level: float, num_parameters: int) -> float:
    """The root mean square norm of the noise, s sqrt(d).

    Args:
        noise_level: s, standard deviation of each entry.
        num_parameters: d.
    """
    return noise_level * math.sqrt(num_parameters)


class SnrMeter:
    """Averages snr^2 over steps; the root of the average is the signal-to-noise ratio.

    The average is cut at zero, and not its terms: where noise dominates, cutting each of them would report the size of
    their fluctuations as a signal.
    """

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def update(self, squared_norm: float, *, noise_level: float, num_parameters: int) -> None:
        """Take the gradient of one step.

        Args:
            squared_norm: ||G~||^2 over all parameters.
            noise_level: s, above zero.
            num_parameters: d.
        """
        self._sum += squared_norm / noise_norm(noise_level=noise_level, num_parameters=num_parameters) ** 2 - 1
        self._count += 1

    @property
    def snr(self) -> float:
        """The ratio over the steps since the start or the last reset; nan before the first."""
        return math.sqrt(max(0.0, self._sum / self._count)) if self._count else math.nan

    def reset(self) -> None:
        """Forget the steps."""
        self._sum, self._count = 0.0, 0
