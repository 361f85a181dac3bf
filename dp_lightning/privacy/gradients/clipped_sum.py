"""The clipped sum of per-example gradients: sum over i of clip(grad l_i), in float32, in any number of pieces."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.gradients.engine import GradientEngine


class ClippedSum:
    """Float32 buffers that collect the clipped gradients of a logical batch.

    Formal guarantee: one example moves the buffers, taken together, by at most ``clip_plan.sensitivity`` in L2 norm
    (float32 rounding aside). An example whose gradient is not finite contributes zero.

    Args:
        parameters: trained parameters by name; their order fixes the order of the groups.
        clip_plan: groups, bounds and factor.
    """

    def __init__(self, parameters: Mapping[str, Tensor], clip_plan: ClipPlan) -> None:
        self.clip_plan = clip_plan
        groups = clip_plan.groups(parameters)
        self.labels = list(groups)
        self._group_of = {name: index for index, names in enumerate(groups.values()) for name in names}
        device = next(iter(parameters.values())).device
        self._bounds = torch.tensor(clip_plan.bounds(groups), dtype=torch.float32, device=device)
        self.sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}

    def reset(self) -> None:
        """Start a new logical batch."""
        for total in self.sums.values():
            total.zero_()

    @torch.no_grad()
    def add(self, contributions: Sequence[Contribution], batch_size: int, *, count: bool = True) -> Tensor:
        """Add one physical batch.

        Args:
            contributions: from ``GradientEngine.contributions``.
            batch_size: number of examples b.
            count: false for a placeholder that must contribute zero.

        Returns:
            (b, L) float32 norms before clipping, one column per group.
        """
        # Autocast would take the products below in bfloat16, and the sum would no longer be what was measured.
        with torch.autocast(self._bounds.device.type, enabled=False):
            return self._add(contributions, batch_size, count=count)

    def _add(self, contributions: Sequence[Contribution], batch_size: int, *, count: bool) -> Tensor:
        seen: set[str] = set()
        squared = self._bounds.new_zeros(len(self._bounds), batch_size)
        for contribution in contributions:
            for name, values in contribution.squared_norms().items():
                assert name not in seen, "a parameter's contributions add up before the norm is taken"
                seen.add(name)
                squared[self._group_of[name]] += values
        norms = squared.sqrt().T
        if not count:
            return norms
        factors = self.clip_plan.factors(norms, self._bounds).T.contiguous()
        unusable = ~norms.isfinite().all(dim=1)
        discard = bool(unusable.any())
        for contribution in contributions:
            if discard:
                contribution.discard(unusable)
            weights = _ByGroup(factors, self._group_of)
            for name, value in contribution.weighted_sum(weights).items():
                self.sums[name] += value
        return norms


class _ByGroup(dict[str, Tensor]):
    """Weights of the examples by parameter name."""

    def __init__(self, factors: Tensor, group_of: Mapping[str, int]) -> None:
        super().__init__()
        self._factors, self._group_of_name = factors, group_of

    def __missing__(self, name: str) -> Tensor:
        return self._factors[self._group_of_name[name]]


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    clip_plan: ClipPlan,
    max_physical_batch_size: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sum of the per-example gradients of ``loss_fn(model(inputs), targets)``.

    Args:
        model: any module whose first dimension is the batch; its mode and its ``.grad`` are left as they are.
        loss_fn: returns the mean of the examples' losses (a scalar), or the losses themselves, shape (B,).
        inputs: a tensor (B, ...), or a tuple, list or dict of such tensors, passed to the model as one argument.
        targets: likewise, passed to the loss.
        clip_plan: how examples are clipped.
        max_physical_batch_size: most examples in one forward and backward pass; None takes all at once. It changes
            the memory needed and nothing else.

    Returns:
        ``sums``: parameter name to float32 tensor of the parameter's shape, the sum over i of clip(grad l_i).
        ``norms``: float32 per-example norms before clipping: (B,) under a flat plan, (B, L) under a per-layer plan
        with columns in the order of ``clip_plan.groups(sums)``.

    Raises:
        ModelError: when a module's per-example gradients cannot be taken; the message names it.
    """
    size = _rows(inputs)
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ConfigurationError(f"max_physical_batch_size is {max_physical_batch_size}; it must be at least 1.")
    engine = GradientEngine(model)
    total = ClippedSum(engine.parameters, clip_plan)
    norms = [torch.zeros(0, len(total.labels), device=next(model.parameters()).device)]
    try:
        for start in range(0, size, max_physical_batch_size or max(size, 1)):
            piece = slice(start, min(start + (max_physical_batch_size or size), size))
            mine, wanted = _cut(inputs, piece), _cut(targets, piece)
            b = piece.stop - piece.start
            with engine.record(b):
                loss = loss_fn(model(mine), wanted)
                engine.scale(loss, 1.0 if loss.dim() else b)
                loss.backward(torch.ones_like(loss) if loss.dim() else None)
                norms.append(total.add(engine.contributions(), b))
    finally:
        engine.detach()
    joined = torch.cat(norms)
    return total.sums, joined[:, 0] if clip_plan.kind == "flat" else joined


def _cut(tree: Any, piece: slice) -> Any:
    return tree_map(lambda leaf: leaf[piece] if isinstance(leaf, Tensor) else leaf, tree)


def _rows(tree: Any) -> int:
    return next(leaf.shape[0] for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))
