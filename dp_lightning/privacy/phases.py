"""Parameters that stay frozen for the first steps of a run, such as all but the last layer.

From which step on a parameter is trained is a number of the plan: a pattern of names, and a share of the planned steps.
Both are fixed before the first step and follow from no example, so every step is the mechanism that it would be for a
model with fewer parameters, and the ledger counts it as any other.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from dp_lightning.errors import ConfigurationError


class Phases:
    """Which parameters are frozen in which step.

    Args:
        frozen_until: patterns of parameter names, with the wildcards * and ?, to the share of the planned steps for
            which these stay frozen; the largest one that matches a name holds.
        parameters: the trained parameters by name.
        num_steps: T of the plan.

    Raises:
        ConfigurationError: a share is not between 0 and 1, a pattern matches nothing, or nothing is trained at first.
    """

    def __init__(
        self, frozen_until: Mapping[str, float], parameters: Mapping[str, nn.Parameter], num_steps: int
    ) -> None:
        self._parameters, self._num_steps = parameters, num_steps
        self._first: dict[str, int] = {}
        for pattern, share in frozen_until.items():
            if not 0 < share < 1:
                raise ConfigurationError(
                    f"privacy.frozen_until has {share} for {pattern!r}; it is a share of the planned steps, above 0 "
                    "and below 1."
                )
            matching = [name for name in parameters if fnmatchcase(name, pattern)]
            if not matching:
                raise ConfigurationError(
                    f"privacy.frozen_until: no trained parameter's name matches {pattern!r}; the first ones are "
                    f"{', '.join(list(parameters)[:8])}"
                )
            for name in matching:
                self._first[name] = max(self._first.get(name, 0), math.floor(share * num_steps))
        if parameters and all(self._first.get(name, 0) > 0 for name in parameters):
            raise ConfigurationError(
                "privacy.frozen_until freezes every trained parameter at first. Leave one out, such as the last layer."
            )

    def frozen(self, step: int) -> set[str]:
        """The names of the parameters that are frozen in a step, counted from 0."""
        return {name for name, first in self._first.items() if step < first}

    @contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Within this context, what is frozen in a step requires no gradient."""
        frozen = [self._parameters[name] for name in self.frozen(step)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def describe(self) -> str:
        """For the privacy statement; empty where nothing is ever frozen."""
        by_step: dict[int, int] = {}
        for first in self._first.values():
            if first > 0:
                by_step[first] = by_step.get(first, 0) + 1
        return ", ".join(
            f"{count} of {len(self._parameters)} frozen before step {first + 1} of {self._num_steps}"
            for first, count in sorted(by_step.items())
        )
