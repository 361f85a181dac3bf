"""The clipped sum of per-example gradients: sum over i of clip(grad l_i), in float32, in any number of pieces."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dp_lightning.errors import DpLightningError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.contribution import Contribution, Weights, finite_, flat_rows
from dp_lightning.processors import sent

# Relative to a bound: squared norms are accurate to 1e-6, and five more roundings of 6e-8 follow.
_ROOM = 2.0**-19


class ClippedSum:
    """Float32 buffers that collect the clipped gradients of a logical batch.

    Formal guarantee: one example contributes at most ``clip_plan.sensitivity`` in L2 norm, including the rounding of
    its norm and of its contribution; adding contributions up rounds the float32 sum once more. A group of an example's
    gradient that is not finite, or whose squared norm overflows float32, contributes zero.

    Args:
        parameters: trained parameters by name; their order fixes the order of the groups.
        clip_plan: groups, bounds and factor.
    """

    def __init__(self, parameters: Mapping[str, Tensor], clip_plan: ClipPlan) -> None:
        self.clip_plan = clip_plan
        groups = clip_plan.groups(parameters)
        self.labels = list(groups)
        self._members = list(groups.values())
        self._group_of = {name: index for index, names in enumerate(self._members) for name in names}
        device = next(iter(parameters.values())).device
        self._known_places: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}  # the last ones
        # A little less than the plan's, for the rounding of norms and factors.
        bounds = [bound * (1 - _ROOM) for bound in clip_plan.bounds(groups)]
        self._first_bounds = self._bounds = torch.tensor(bounds, dtype=torch.float32, device=device)
        self.discarded = torch.zeros((), dtype=torch.int64, device=device)
        """How many examples of the logical batch have a gradient that is not finite."""
        self.within = torch.zeros((), dtype=torch.float32, device=device)
        """The sum of 1/2 for each example whose norm in the first group is at most its bound, and -1/2 for others."""
        # The strides of a dense tensor, even if a parameter is a view of a larger one.
        self._places = {
            name: (p.shape, torch.empty_like(p, device="meta").stride(), p.numel()) for name, p in parameters.items()
        }
        self.flat = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float32, device=device)
        """All sums in one tensor, in the order of the parameters."""
        self.sums = self.views(self.flat)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a tensor like ``flat`` by parameter name, in the parameter's shape and memory format."""
        parts = flat.split([numel for _, _, numel in self._places.values()])
        return {
            name: part.as_strided(shape, stride)
            for (name, (shape, stride, _)), part in zip(self._places.items(), parts, strict=True)
        }

    def reset(self, scale: float = 1.0) -> None:
        """Start a new logical batch.

        Args:
            scale: the bounds of this batch over those of the plan.
        """
        self._bounds = self._first_bounds * scale
        self.flat.zero_()
        self.discarded.zero_()
        self.within.zero_()

    def begin(self, batch_size: int, counted: Tensor | None = None) -> None:
        """Start a physical batch of ``batch_size`` examples.

        Args:
            batch_size: b.
            counted: (b,) whether each example takes part; one that does not contributes zero. None counts all.
        """
        self._counted = counted
        self._squared = torch.zeros(batch_size, len(self.labels), dtype=torch.float64, device=self.flat.device)
        self._kept: list[Contribution] = []
        # Measured at the end: what is of one kind together, and what grows when no activation is left in memory.
        self._later: dict[Hashable, list[Contribution]] = {}
        self._rows: dict[str, Tensor] = {}
        self._seen: set[str] = set()

    def take(self, contribution: Contribution) -> None:
        """Take what the physical batch contributes to some parameters; each parameter comes in one contribution only.

        If these are all parameters of their groups, they are clipped and added at once, and nothing is kept but small
        gradients, and what is small before it is measured.
        """
        names = contribution.names
        if not self._seen.isdisjoint(names):
            raise DpLightningError(f"{names} come twice: their gradients add up before the norm is taken.")
        self._seen.update(names)
        if contribution.kind is not None:
            self._later.setdefault(contribution.kind, []).append(contribution)
            return
        if len(contribution.rows) == len(names):
            self._rows.update(contribution.rows)
            return
        groups = {self._group_of[name] for name in names}
        # Autocast would compute the products in bfloat16, and the sum would no longer be what was measured.
        with torch.no_grad(), torch.autocast(self.flat.device.type, enabled=False):
            if len(names) == sum(len(self._members[group]) for group in groups):
                contribution.stream(self._weigh, self.sums)
            elif contribution.grows:
                self._later[names] = [contribution]
            else:
                self._keep(contribution)

    def _keep(self, contribution: Contribution) -> None:
        contribution.measure()
        self._rows.update(contribution.rows)
        if len(contribution.rows) < len(contribution.names):
            self._kept.append(contribution)

    @torch.no_grad()
    def end(self) -> Tensor:
        """End the physical batch.

        Returns:
            (b, L) float32 norms before clipping, one column per group.
        """
        with torch.autocast(self.flat.device.type, enabled=False):
            for first, *others in self._later.values():
                self._keep(first.joined(others) if others else first)
            parts: dict[int, list[Tensor]] = {}
            for contribution in self._kept:
                for name, norms in contribution.norms().items():
                    parts.setdefault(self._group_of[name], []).append(norms)
            for group, found in parts.items():
                self._squared[:, group] += _squared(found)
            small = self._joined_rows()
            squared = self._squared.float()
            norms = squared.sqrt()
            factors = self.clip_plan.factors(norms, self._bounds)
            if self._counted is not None:
                factors = factors * self._counted.unsqueeze(1)
            by_group = factors.unbind(1)
            for contribution in self._kept:
                weights = {name: by_group[self._group_of[name]] for name in contribution.names}
                contribution.add_weighted(weights, self.sums)
            if small is not None:
                self._add_rows(small, factors)
        broken = (~squared.isfinite()).any(dim=1)
        self.discarded += (broken if self._counted is None else broken & self._counted).sum()
        self._kept, self._later, self._rows = [], {}, {}
        if self.clip_plan.adaptive is not None:
            halves = (norms[:, 0] <= self._bounds[0]).float() - 0.5
            self.within += (halves if self._counted is None else halves * self._counted).sum()
        return norms

    def _joined_rows(self) -> Tensor | None:
        """The small gradients as one tensor (b, numbers), float32, whose norms are added here; None without any."""
        if not self._rows:
            return None
        # In one order, since the places of these names are looked up once.
        self._rows = {name: self._rows[name] for name in self._places if name in self._rows}
        rows = torch.cat([flat_rows(rows).float() for rows in self._rows.values()], dim=1)
        if len(self.labels) == 1:
            self._squared[:, 0] += _squared([rows])
        else:
            _, groups = self._places_of_rows()
            self._squared.scatter_add_(1, groups.expand_as(rows), rows.double().square_())
        return rows

    def _add_rows(self, rows: Tensor, factors: Tensor) -> None:
        finite_(rows)  # a row with other numbers has the factor zero
        places, groups = self._places_of_rows()
        total = rows.T.mv(factors[:, 0]) if len(self.labels) == 1 else (rows * factors[:, groups]).sum(0)
        self.flat.index_add_(0, places, total)

    def _places_of_rows(self) -> tuple[Tensor, Tensor]:
        """The place in ``flat`` of each number of the small gradients, and its group."""
        names = tuple(self._rows)
        if names not in self._known_places:
            ends = dict(zip(self._places, accumulate(n for _, _, n in self._places.values()), strict=True))
            places, groups = [], []
            for name in names:
                shape, stride, numel = self._places[name]
                places.append(torch.arange(ends[name] - numel, ends[name]).as_strided(shape, stride).flatten())
                groups.append(torch.full((numel,), self._group_of[name]))
            place, group = (sent(torch.cat(each), self.flat.device) for each in (places, groups))
            self._known_places = {names: (place, group)}
        return self._known_places[names]

    def _weigh(self, rows: slice, norms: Mapping[str, Tensor]) -> Weights:
        by_group: dict[int, list[Tensor]] = {}
        for name, values in norms.items():
            by_group.setdefault(self._group_of[name], []).append(values)
        factors = {}
        for group, parts in by_group.items():
            squared = _squared(parts)
            self._squared[rows, group] = squared
            factor = self.clip_plan.factors(squared.float().sqrt(), self._bounds[group])
            factors[group] = factor if self._counted is None else factor * self._counted[rows]
        return {name: factors[self._group_of[name]] for name in norms}


def _squared(norms: Sequence[Tensor]) -> Tensor:
    """(r,) float64 sums of the squares of norms (r, k)."""
    parts = norms[0] if len(norms) == 1 else torch.cat(tuple(norms), dim=1)
    return torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64).square_()
