"""The gradient side of DiSK (Zhang et al. 2025): where each example's gradient is taken.

DiSK is a Kalman filter whose prediction follows the parameters. With x_t the parameters, d = x_t - x_{t-1} their last
step and kappa the gain, each example's gradient is replaced before it is clipped by

    c grad f(x_t + gamma d) + (1 - c) grad f(x_t),    c = (1 - kappa) / (kappa gamma),

and the privatized gradient goes through the filter g <- (1 - kappa) g + kappa g~, which is
`dp_lightning.postprocess.Kalman`. With gamma = (1 - kappa) / kappa, the one used here, c is 1 and one gradient at the
extrapolated point is enough. x_t and d are releases of earlier steps, and one example is still clipped once: the
sensitivity is that of DP-SGD.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError


@dataclass(frozen=True)
class DiSK:
    """Settings of DiSK.

    Args:
        gain: kappa in (0, 1), which the `Kalman` filter of the chain has too.

    Raises:
        ConfigurationError: the gain is outside its range.
    """

    gain: float

    def __post_init__(self) -> None:
        if not 0 < self.gain < 1:
            raise ConfigurationError(
                f"privacy.disk.gain must lie between 0 and 1, got {self.gain}. A gain above 1 amplifies the noise, and "
                "1 is DP-SGD"
            )


class Extrapolation:
    """Moves parameters along their last step and back.

    Args:
        parameters: the trained parameters, by name; changed in place within `away`.
        disk: the settings; None moves nothing.
    """

    def __init__(self, parameters: Mapping[str, Tensor], disk: DiSK | None) -> None:
        self._parameters = dict(parameters)
        self._length = 0.0 if disk is None else (1 - disk.gain) / disk.gain  # gamma
        self._here: dict[str, Tensor] = {}
        self._shift: dict[str, Tensor] = {}

    @torch.no_grad()
    def advance(self) -> None:
        """Start a step at the parameters as they are now."""
        if self._length == 0:
            return
        here = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._shift = {name: self._length * (here[name] - before) for name, before in self._here.items()}
        self._here = here

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within this context, parameters are at x_t + gamma d, where there is a d; then back at x_t, bit for bit."""
        with torch.no_grad():
            for name, shift in self._shift.items():
                self._parameters[name].add_(shift)
        try:
            yield
        finally:
            with torch.no_grad():
                for name in self._shift:
                    self._parameters[name].copy_(self._here[name])

    def state_dict(self) -> dict[str, Tensor]:
        """x_t of the last step that was started, by name."""
        return dict(self._here)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; a parameter that it does not hold has made no step yet."""
        known = {name: value for name, value in state.items() if name in self._parameters}
        self._here = {name: value.to(self._parameters[name]) for name, value in known.items()}
