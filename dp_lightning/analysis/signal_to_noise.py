"""The signal-to-noise ratio ||G|| / ||N|| of a privatized gradient, from public numbers and the gradient itself.

A privatized gradient of d parameters is G~ = G + N, where N has independent N(0, s^2) entries and s = sigma S / B is
known. Since E ||G~||^2 = ||G||^2 + s^2 d,

    snr^2 = ||G||^2 / (s^2 d) = E ||G~||^2 / (s^2 d) - 1.

One step estimates snr^2 without bias, with a standard deviation of sqrt(2/d + 4 snr^2/d). Only the privatized gradient
enters, so the estimate is post-processing. The same holds for the gradient of one parameter tensor, whose entries have
noise of the same level. The average over steps is cut off at zero, and not its terms: if noise dominates, that would
report the size of the fluctuations as a signal.
"""

import math


def signal_to_noise(squares: float, count: int) -> float:
    """The signal-to-noise ratio of a privatized gradient over some steps.

    Args:
        squares: the sum over the steps of ||G~||^2 / s^2, where s may differ from step to step.
        count: of the numbers squared in it: d for each step.
    """
    return math.sqrt(max(0.0, squares / count - 1))
