"""The clipped sum of per-example gradients: sum over i of clip(grad l_i), in float32, in any number of pieces."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.contribution import Contribution, Weights
from dp_lightning.privacy.gradients.engine import GradientEngine
from dp_lightning.privacy.gradients.workspace import Workspace

# Of a bound, relative: squared norms are known to 1e-6, and five more roundings to 6e-8 follow.
_ROOM = 2.0**-19


class ClippedSum:
    """Float32 buffers that collect the clipped gradients of a logical batch.

    Formal guarantee: one example contributes at most ``clip_plan.sensitivity`` in L2 norm, the rounding of its norm and
    of its contribution included; where contributions are added up, the float32 sum is rounded once more. A group of an
    example's gradient that is not finite, or whose squared norm overflows float32, contributes zero.

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
        # Dense, also where a parameter is a view of a larger tensor.
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

    def begin(self, batch_size: int, *, count: bool = True) -> None:
        """Start a physical batch of ``batch_size`` examples; without ``count`` they contribute zero."""
        self._count = count
        self._squared = [bound.new_zeros(batch_size, dtype=torch.float64) for bound in self._bounds]
        self._kept: list[Contribution] = []
        self._seen: set[str] = set()

    @torch.no_grad()
    def take(self, contribution: Contribution) -> None:
        """Take what the physical batch contributes to some parameters, each of them in one contribution.

        Where these are all parameters of their groups, they are clipped and added at once and nothing is kept.
        """
        assert not self._seen & set(contribution.names), "a parameter's contributions add up before the norm is taken"
        self._seen.update(contribution.names)
        groups = {self._group_of[name] for name in contribution.names}
        complete = all(set(self._members[group]) <= set(contribution.names) for group in groups)
        # Autocast would take the products in bfloat16, and the sum would no longer be what was measured.
        with torch.autocast(self.discarded.device.type, enabled=False):
            if complete and self._count:
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
        if self._count:
            weights = self._weights(slice(None), [name for kept in self._kept for name in kept.names])
            with torch.autocast(squared.device.type, enabled=False):
                for contribution in self._kept:
                    self._add(contribution.weighted_sum(weights))
            self.discarded += (~squared.isfinite()).any(dim=1).sum()
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
        return {name: factors[self._group_of[name]] for name in names}

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] += value


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    clip_plan: ClipPlan,
    augmult: int = 1,
    max_physical_batch_size: int | None = None,
    explain: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sum of the per-example gradients of ``loss_fn(model(inputs), targets)``.

    With K = ``augmult`` each example has K views, rows that follow each other. Its gradient is the mean of those of
    its views, which is clipped once (De et al. 2022).

    Args:
        model: any module whose first dimension is the batch; its mode and its ``.grad`` are left as they are.
        loss_fn: returns the mean of the rows' losses (a scalar), or the losses themselves, shape (B * K,).
        inputs: a tensor (B * K, ...), or a tuple, list or dict of such tensors, passed to the model as one argument.
        targets: likewise, passed to the loss.
        clip_plan: how examples are clipped.
        augmult: K.
        max_physical_batch_size: most rows in one forward and backward pass; None takes all at once. It changes the
            memory needed and nothing else.
        explain: print how the gradients of each module are taken.

    Returns:
        ``sums``: parameter name to float32 tensor of the parameter's shape, the sum over i of clip(grad l_i).
        ``norms``: float32 per-example norms before clipping: (B,) under a flat plan, (B, L) under a per-layer plan
        with columns in the order of ``clip_plan.groups(sums)``.

    Raises:
        ModelError: when a module's per-example gradients cannot be taken; the message names it.
        ConfigurationError: when the tensors have different numbers of rows, or not K for each example.

    Whether the model treats its examples apart, and uses its parameters in the modules that they belong to, is not
    checked here. A training run checks it (``dp_lightning.privacy.checks``).
    """
    size = _rows(inputs, targets)
    if augmult < 1 or size % augmult:
        raise ConfigurationError(f"augmult is {augmult}; it must divide the number of rows, {size}.")
    if max_physical_batch_size is not None and max_physical_batch_size < augmult:
        raise ConfigurationError(
            f"max_physical_batch_size is {max_physical_batch_size}; it must be at least {augmult}, the rows of one "
            "example."
        )
    step = (max_physical_batch_size or max(size, augmult)) // augmult * augmult
    engine = GradientEngine(model)
    total = ClippedSum(engine.parameters, clip_plan)
    norms = [torch.zeros(0, len(total.labels), device=next(model.parameters()).device)]
    try:
        for start in range(0, size, step):
            piece = slice(start, min(start + step, size))
            mine, wanted = _cut(inputs, piece), _cut(targets, piece)
            b = (piece.stop - piece.start) // augmult
            total.begin(b)
            with engine.record(b, total.take, augmult=augmult):
                loss = loss_fn(model(mine), wanted)
                engine.scale(loss, 1 / augmult if loss.dim() else b)
                loss.backward(torch.ones_like(loss) if loss.dim() else None)
            norms.append(total.end())
    finally:
        engine.detach()
    if unused := engine.unused() if size else []:
        warnings.warn(
            f"The modules of {', '.join(unused)} did not run, so these parameters get no gradient. A parameter has to "
            "be used by calling the module that it belongs to.",
            stacklevel=2,
        )
    if explain:
        print(engine.explanation())
    joined = torch.cat(norms)
    return total.sums, joined[:, 0] if clip_plan.kind == "flat" else joined


def _cut(tree: Any, piece: slice) -> Any:
    return tree_map(lambda leaf: leaf[piece] if isinstance(leaf, Tensor) else leaf, tree)


def _rows(*trees: Any) -> int:
    tensors = [leaf for leaf in tree_flatten(trees)[0] if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
        raise ConfigurationError(
            f"The tensors in inputs and targets have the shapes {shapes}. "
            "The first dimension of each must be the batch."
        )
    return int(sizes.pop())  # type: ignore[arg-type]
