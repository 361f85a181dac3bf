"""Parameters that stay frozen for the first steps of a run, such as all but the last layer.

From which step on a parameter is trained is a number of the plan: a pattern of names, and a share of the planned steps.
Both are fixed before the first step and follow from no example, so every step is the mechanism that it would be for a
model with fewer parameters, and the ledger counts it as any other.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from dp_lightning.errors import ConfigurationError

# The key in a state dict whose other keys are names of parameters; no parameter has this name.
_STEPS = "first step of each parameter"


class Phases:
    """Which parameters are frozen in which step.

    Args:
        frozen_until: patterns of parameter names, with the wildcards * and ?, to the share of the planned steps for
            which these stay frozen; where several patterns match a name, the largest share counts.
        parameters: the trained parameters by name.
        num_steps: T of the plan.

    Raises:
        ConfigurationError: as `shares_of`.
    """

    def __init__(
        self, frozen_until: Mapping[str, float], parameters: Mapping[str, nn.Parameter], num_steps: int
    ) -> None:
        self._parameters = parameters
        shares = shares_of(frozen_until, parameters)
        self._first = {name: math.floor(share * num_steps) for name, share in shares.items()}

    def frozen(self, step: int) -> set[str]:
        """The names of the parameters that are frozen in a step, counted from 0."""
        return {name for name, first in self._first.items() if step < first}

    @contextmanager
    def freezing(self, step: int) -> Iterator[None]:
        """Within this context, the parameters that are frozen in a step require no gradient."""
        frozen = [self._parameters[name] for name in self.frozen(step)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, Tensor]:
        """The first step of each parameter, which a resumed run keeps; empty where nothing is ever frozen."""
        first = [self._first.get(name, 0) for name in self._parameters]
        return {_STEPS: torch.tensor(first)} if any(first) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the first step of each parameter from ``state_dict``."""
        if (first := state.get(_STEPS)) is not None:
            self._first = dict(zip(self._parameters, first.tolist(), strict=True))

    def describe(self) -> str:
        """For the privacy statement; empty where nothing is ever frozen."""
        by_step = Counter(first for first in self._first.values() if first > 0)
        return ", ".join(
            f"{count} of {len(self._parameters)} frozen before step {first + 1}"
            for first, count in sorted(by_step.items())
        )


def shares_of(frozen_until: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """The share of the planned steps for which each parameter stays frozen, by name, without those that never do.

    Raises:
        ConfigurationError: a share is not between 0 and 1, a pattern matches nothing, or nothing is trained at first.
    """
    found: dict[str, float] = {}
    for pattern, share in frozen_until.items():
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise ConfigurationError(
                f"privacy.frozen_until has {share} for {pattern!r}; it is a share of the planned steps, above 0 and "
                "below 1."
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigurationError(
                f"privacy.frozen_until: no trained parameter's name matches {pattern!r}; the first ones are "
                f"{', '.join(list(names)[:8])}"
            )
        for name in matching:
            found[name] = max(found.get(name, 0.0), share)
    if names and len(found) == len(names):
        raise ConfigurationError(
            "privacy.frozen_until freezes every trained parameter at first. Leave one out, such as the last layer."
        )
    return found
