"""The clipped sum of per-example gradients: sum over i of clip(grad l_i), in float32, in any number of pieces."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.contribution import Contribution, Weights
from dp_lightning.privacy.gradients.workspace import Workspace

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
        self._workspace = Workspace()
        # A little less, for the rounding of norms and factors.
        bounds = [bound * (1 - _ROOM) for bound in clip_plan.bounds(groups)]
        self._bounds = torch.tensor(bounds, dtype=torch.float32, device=device).unbind()
        self.discarded = torch.zeros((), dtype=torch.int64, device=device)
        """How many examples of the logical batch have a gradient that is not finite."""
        # Dense, even if a parameter is a view of a larger tensor.
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

    def reset(self) -> None:
        """Start a new logical batch."""
        self.flat.zero_()
        self.discarded.zero_()

    def begin(self, batch_size: int, counted: Tensor | None = None) -> None:
        """Start a physical batch of ``batch_size`` examples.

        Args:
            batch_size: b.
            counted: (b,) whether each example takes part; one that does not contributes zero. None counts all.
        """
        self._counted = counted
        self._squared = [bound.new_zeros(batch_size, dtype=torch.float64) for bound in self._bounds]
        self._kept: list[Contribution] = []
        self._seen: set[str] = set()

    @torch.no_grad()
    def take(self, contribution: Contribution) -> None:
        """Take what the physical batch contributes to some parameters; each parameter comes in one contribution only.

        If these are all parameters of their groups, they are clipped and added at once, and nothing is kept.
        """
        assert not self._seen & set(contribution.names), "a parameter's contributions add up before the norm is taken"
        self._seen.update(contribution.names)
        groups = {self._group_of[name] for name in contribution.names}
        complete = all(set(self._members[group]) <= set(contribution.names) for group in groups)
        # Autocast would compute the products in bfloat16, and the sum would no longer be what was measured.
        with torch.autocast(self.discarded.device.type, enabled=False):
            if complete:
                self._add(contribution.stream(self._weigh, self._workspace))
                return
            contribution.measure(self._workspace)
            self._note(slice(None), contribution.squared_norms())
        self._kept.append(contribution)

    @torch.no_grad()
    def end(self) -> Tensor:
        """End the physical batch.

        Returns:
            (b, L) float32 norms before clipping, one column per group.
        """
        squared = torch.stack(self._squared, dim=1).float()
        weights = self._weights(slice(None), [name for kept in self._kept for name in kept.names])
        with torch.autocast(squared.device.type, enabled=False):
            for contribution in self._kept:
                self._add(contribution.weighted_sum(weights))
        broken = (~squared.isfinite()).any(dim=1)
        self.discarded += (broken if self._counted is None else broken & self._counted).sum()
        self._kept = []
        return squared.sqrt()

    def _note(self, rows: slice, squared: Mapping[str, Tensor]) -> None:
        for name, values in squared.items():
            self._squared[self._group_of[name]][rows].add_(values)

    def _weigh(self, rows: slice, squared: Mapping[str, Tensor]) -> Weights:
        self._note(rows, squared)
        return self._weights(rows, tuple(squared))

    def _weights(self, rows: slice, names: Sequence[str]) -> Weights:
        factors = {
            group: self.clip_plan.factors(self._squared[group][rows].float().sqrt(), self._bounds[group])
            for group in {self._group_of[name] for name in names}
        }
        if self._counted is not None:
            factors = {group: factor * self._counted[rows] for group, factor in factors.items()}
        return {name: factors[self._group_of[name]] for name in names}

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] += value
