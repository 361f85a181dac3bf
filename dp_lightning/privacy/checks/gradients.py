"""Checks that per-example gradients are those of each example alone, for every parameter by itself."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.privacy.checks.losses import TOLERANCE
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.gradients.engine import GradientEngine
from dp_lightning.privacy.gradients.workspace import Workspace


class Gap(NamedTuple):
    """How far two gradients of a parameter may be apart: in parts of its own length, and of the whole gradient's."""

    own: float
    whole: float


IN_FLOAT32, IN_FLOAT64 = Gap(1e-3, 1e-5), Gap(1e-4, 1e-8)
# For a model that cannot run in float64: deep networks amplify the rounding of float32.
IN_FLOAT32_ALONE = Gap(0.0, TOLERANCE)


def check_gradients(
    engine: GradientEngine,
    loss_of: Callable[[Any], Tensor],
    together: Any,
    alone: Sequence[Any],
    *,
    augmult: int,
    loss_reduction: str,
    gap: Gap,
) -> None:
    """Compare the per-example gradients of a batch with ordinary gradients of each example alone.

    Args:
        engine: attached to the model.
        loss_of: batch to scalar loss, as training computes it.
        together: the batch, ``augmult`` rows for each example.
        alone: batches of one example each, in the same order.
        augmult: rows of an example.
        loss_reduction: ``mean`` or ``sum``, how ``loss_of`` reduces.
        gap: what rounding may change.

    Raises:
        ModelError: naming the parameter.
    """
    b = len(alone)
    with torch.enable_grad():
        contributions: list[Contribution] = []
        workspace = Workspace()

        def keep(contribution: Contribution) -> None:
            contribution.measure(workspace)
            contributions.append(contribution)

        with engine.record(b, keep, augmult=augmult):
            loss = _with_copies(engine, loss_of, together)
            engine.scale(loss, b if loss_reduction == "mean" else 1)
            loss.backward()
        for index, batch in enumerate(alone):
            names = list(engine.parameters)
            expected = torch.autograd.grad(
                loss_of(batch), [engine.parameters[name] for name in names], allow_unused=True
            )
            row = torch.zeros(b, device=loss.device, dtype=torch.float32)
            row[index] = 1.0
            ours = {}
            for contribution in contributions:
                ours.update(contribution.weighted_sum(dict.fromkeys(contribution.names, row)))
            _compare(names, expected, ours, gap)


def _with_copies(engine: GradientEngine, loss_of: Callable[[Any], Tensor], together: Any) -> Tensor:
    try:
        return loss_of(together)
    except RuntimeError as error:
        copied = [
            f"{unit.name}.{own}".lstrip(".")
            for unit in engine.units
            if unit.kind == "broadcast"
            for own in unit.parameters
        ]
        if not copied:
            raise
        raise ModelError(
            f"The model fails where parameters with a leading 1 ({', '.join(copied[:5])}) have one copy per example in "
            f"the place of the 1, as in a private step: {error}. Let them take the batch's size by expand(len(x), ...) "
            "or by broadcasting, as in x + p, and not by repeat, view or an interpolation of all."
        ) from error


def _compare(names: list[str], expected: Sequence[Tensor | None], ours: dict[str, Tensor], gap: Gap) -> None:
    scale = sum(float(g.double().square().sum()) for g in expected if g is not None) ** 0.5
    for name, gradient in zip(names, expected, strict=True):
        mine = ours.get(name)
        if gradient is None and mine is None:
            continue
        reference = torch.zeros_like(mine) if gradient is None and mine is not None else gradient
        found = torch.zeros_like(reference) if mine is None and reference is not None else mine
        assert reference is not None
        assert found is not None
        difference = float((reference.double() - found.double()).norm())
        length = float(reference.double().norm())
        # Without a contribution there would be noise and no gradient, however small the gradient is.
        allowed = min(gap, IN_FLOAT32, key=lambda each: each.whole) if mine is None else gap
        if not difference <= allowed.own * length + allowed.whole * max(scale, 1e-12):
            raise ModelError(
                f"The per-example gradient of parameter '{name}' differs from the gradient of the example alone (by "
                f"{difference:.3g}, where its gradient is {length:.3g} and the whole one {scale:.3g} long). Either "
                "examples mix in a layer, or the parameter is used outside of its own module's forward, such as "
                "F.linear(x, other.weight) or a penalty on the weights in the loss. Call the module itself; give a "
                "penalty to the optimizer as weight_decay; or freeze the parameter (requires_grad=False)."
            )
