"""The runs of an audit: the configuration's own module and private step at q = 1, on synthetic examples.

Each run is a fit of `synthetic_fit` with another loss:

* noise: the module's own loss times zero. The released sum is noise alone.
* canaries: the loss of a canary is a large number times the sum of a few coordinates of the parameters, one in each
  clipping group, so that each group is clipped to its bound in a known direction.
* contributions: without noise. One step with all canaries; then one step for each of a few examples, whose loss is the
  module's own times a large number, while the losses of the others are multiplied by zero.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dp_lightning.commands.fit_settings import SettingsReader, num_train_of, prepare
from dp_lightning.commands.pricing import plan_of
from dp_lightning.commands.synthetic_fit import Columns, Releases, fit_on_synthetic_images
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import PrivacyPlan

# Examples in the runs of noise and of contributions.
EXAMPLES = 8
# Noise values that the run of noise aims for.
_DRAWS = 200_000
# Canaries left out for each canary that takes part; they cost nothing and sharpen the false positive rate.
EXCLUDED = 4
# Norm of a gradient before clipping, in units of C: far above C, and its square far below the largest float32.
_LENGTH = 1e4
# Bytes for the gradients of the canaries in one physical batch.
_MEMORY = 2**28


@dataclass(frozen=True)
class Canaries:
    """Coordinates of the parameters; each canary has at most one per parameter.

    Attributes:
        places: (n, P) int64, index into the flattened parameter.
        chosen: (n, P) bool, whether the canary has a coordinate in the parameter.
    """

    places: Tensor
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def along(self, released: Sequence[Tensor]) -> Tensor:
        """The coordinates of a released sum, (n, P) float64; zero where a canary has none."""
        columns = [tensor.flatten()[self.places[:, k]] for k, tensor in enumerate(released)]
        return torch.stack(columns, dim=1).double() * self.chosen


def place_canaries(
    sizes: Mapping[str, int], groups: Sequence[Sequence[str]], count: int, generator: torch.Generator
) -> tuple[Canaries, Canaries]:
    """Draw distinct random coordinates for the canaries that take part, and for those that do not.

    Each canary has a coordinate in every group, as long as there are enough: four fifths of a parameter's coordinates
    are kept for canaries that do not take part. The parameters of a group share its canaries as evenly as their sizes
    allow.

    Args:
        sizes: Number of elements of each parameter.
        groups: Names of the parameters that are clipped together.
        count: Number of canaries that take part, if the parameters have room for them.
    """
    names = list(sizes)
    kept: tuple[list[list[tuple[int, int]]], ...] = ([], [])
    for group in groups:
        left, drawn = count, ([], [])  # type: ignore[var-annotated]
        for place, name in enumerate(sorted(group, key=lambda name: sizes[name])):  # large ones take what is left
            taken = min(_room(sizes[name]), -(-left // (len(group) - place)))
            left -= taken
            order = torch.randperm(sizes[name], generator=generator)[: (1 + EXCLUDED) * taken].tolist()
            for mine, coordinates in zip(drawn, (order[:taken], order[taken:]), strict=True):
                mine.extend((names.index(name), coordinate) for coordinate in coordinates)
        for every, mine in zip(kept, drawn, strict=True):
            every.append([mine[k] for k in torch.randperm(len(mine), generator=generator).tolist()])
    included, excluded = (_canaries(every, len(sizes)) for every in kept)
    return included, excluded


def _room(size: int) -> int:
    """The most canaries that can take part in a parameter of ``size`` elements."""
    return max(1, size // (1 + EXCLUDED))


def _canaries(groups: Sequence[Sequence[tuple[int, int]]], parameters: int) -> Canaries:
    count = max(map(len, groups))
    places = torch.zeros(count, parameters, dtype=torch.int64)
    chosen = torch.zeros(count, parameters, dtype=torch.bool)
    for slots in groups:
        for row, (parameter, place) in enumerate(slots):
            places[row, parameter], chosen[row, parameter] = place, True
    return Canaries(places, chosen)


class AuditRuns:
    """Makes the runs of an audit.

    Args:
        arguments: Options of ``dpl fit``.

    Raises:
        DpLightningError: if a setting is wrong; the message names it and the fix.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.settings = SettingsReader()(arguments)
        cli = prepare(self.settings)
        num_train = num_train_of(cli)
        self.plan: PrivacyPlan = plan_of(self.settings["privacy"], self.settings["trainer"], num_train=num_train)
        if self.plan.noise_multiplier == 0:
            raise ConfigurationError("privacy.noise_multiplier is 0: the run claims no privacy, so nothing is audited.")
        self.clip_plan: ClipPlan = cli.privacy.clip_plan
        self.sizes = {name: p.numel() for name, p in cli.model.named_parameters() if p.requires_grad}
        self.groups = list(self.clip_plan.groups(self.sizes).values())
        self.is_first = cli.trainer.is_global_zero
        #: Standard deviation of the noise on the sum, as the configuration claims it.
        self.noise_standard_deviation = self.plan.noise_multiplier * self.clip_plan.sensitivity
        self._length = _LENGTH * max(self.clip_plan.max_grad_norm, 1.0)

    def noise(self, releases: Releases) -> tuple[float, ...]:
        """Take enough steps of noise alone for ``_DRAWS`` noise values, but from 8 to 32.

        Args:
            releases: called with the independent noise of which that of the step is made, for each step.

        Returns:
            The coefficients of the noise.
        """
        steps = min(max(-(-_DRAWS // sum(self.sizes.values())), 8), 32)
        found: list[dict[str, Tensor]] = []

        def step(module: pl.LightningModule, own: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
            return lambda batch: own(batch[0]) * 0.0

        bands, examples = self.plan.bands, -(-EXAMPLES // self.plan.bands) * self.plan.bands
        chosen = self._fit(
            step, _numbers_of(examples), lambda _, sums: found.append(sums), examples=examples, steps=steps, bands=bands
        )
        for number in range(steps):
            terms = list(zip(chosen, found[number::-1], strict=False))
            releases(
                number, {name: torch.stack([c * sums[name] for c, sums in terms]).sum(0) for name in found[number]}
            )
        return chosen

    def canaries(
        self,
        count: int,
        steps: int,
        releases: Callable[[Canaries, Canaries, list[Tensor]], None],
        *,
        private: bool = True,
    ) -> None:
        """Take steps in which ``count`` canaries take part.

        Args:
            releases: Called for each step with the canaries that take part, those that do not, and the released sums.
            private: Whether noise is added.
        """
        found: list[Canaries] = []

        def columns(generator: torch.Generator) -> tuple[Tensor, ...]:
            found[:] = place_canaries(self.sizes, self.groups, count, generator)
            return found[0].places, found[0].chosen

        def step(module: pl.LightningModule, own: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
            parameters = [p for p in module.parameters() if p.requires_grad]

            def loss(batch: Any) -> Tensor:
                _, places, chosen = (part[0] if isinstance(part, Tensor) else part for part in batch)  # of one view
                values = [p.reshape(-1).gather(0, places[k : k + 1]) for k, p in enumerate(parameters)]
                return self._length * (torch.cat(values) * chosen).sum()

            return loss

        def look(number: int, sums: dict[str, Tensor]) -> None:
            releases(found[0], found[1], list(sums.values()))

        rows = max(min(count, sum(_room(self.sizes[name]) for name in group)) for group in self.groups)
        largest = max(_MEMORY // (4 * sum(self.sizes.values())), 1)
        self._fit(step, columns, look, examples=rows, steps=steps, private=private, largest=largest)

    def contributions(self, releases: Releases) -> None:
        """Take ``EXAMPLES`` steps without noise, with a nonzero loss for one example in each step."""

        def step(module: pl.LightningModule, own: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
            return lambda batch: own(batch[0]) * ((batch[1][0] == module.trainer.global_step) * self._length)

        self._fit(step, _numbers_of(EXAMPLES), releases, examples=EXAMPLES, steps=EXAMPLES, private=False)

    def _fit(self, *functions: Any, private: bool = True, **numbers: Any) -> tuple[float, ...]:
        """`fit_on_synthetic_images` with the plan's noise, or without noise."""
        sigma = self.plan.noise_multiplier if private else 0.0
        return fit_on_synthetic_images(self.settings, *functions, noise_multiplier=sigma, **numbers)


def _numbers_of(examples: int) -> Columns:
    return lambda generator: (torch.arange(examples),)
