"""The clipped sum of a batch's gradients in one call, for analysis and tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import explaining
from dp_lightning.torch_internals import tree_leaves, tree_map_only


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

    With K = ``augmult``, each example has K views in consecutive rows. The model and the loss see the K rows
    of one example; its gradient is clipped once.

    Args:
        model: any module whose first dimension is the batch; its mode and its ``.grad`` are left as they are.
        loss_fn: returns the loss of an example's rows, a scalar, or the losses of the rows, of which the mean is taken.
        inputs: a tensor (B * K, ...), or a tuple, list or dict of such tensors, passed to the model as one argument.
        targets: likewise, passed to the loss.
        clip_plan: how examples are clipped.
        augmult: K.
        max_physical_batch_size: the most rows in one forward and backward pass, but those of one example at least; None
            takes all at once. It changes only the memory needed.
        explain: print how the gradients of each parameter are computed.

    Returns:
        ``sums``: parameter name to float32 tensor of the parameter's shape, the sum over i of clip(grad l_i).
        ``norms``: float32 per-example norms before clipping: (B,) under a flat plan, (B, L) under a per-layer plan
        with columns in the order of ``clip_plan.groups(sums)``.

    Raises:
        ModelError: when per-example gradients cannot be computed.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = ClippedSum(trained, clip_plan)
    examples = tree_map_only(Tensor, lambda rows: rows.unflatten(0, (-1, augmult)), (inputs, targets))
    size = next(len(leaf) for leaf in tree_leaves(examples) if isinstance(leaf, Tensor))
    step = max((max_physical_batch_size or size * augmult) // augmult, 1)
    norms = [torch.zeros(0, len(total.labels), device=total.flat.device)]
    methods: dict[str, str] = {}
    for start in range(0, size, step):
        piece = tree_map_only(Tensor, lambda rows: rows[start : start + step], examples)  # noqa: B023
        b = min(step, size - start)
        total.begin(b)
        recording = Recording(trained, b, total.take)
        with explaining():
            recording.backward(recording.run(lambda x, y: loss_fn(model(x), y).mean(), *piece))
        norms.append(total.end())
        methods |= recording.methods
    if explain:
        print("\n".join(f"{name}  {methods.get(name, 'not used')}" for name in trained))
    joined = torch.cat(norms)
    return total.sums, joined[:, 0] if clip_plan.kind == "flat" else joined
