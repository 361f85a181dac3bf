"""The clipped sum of a batch's per-example gradients, as the steps of a run take it under vmap."""

from torch import Tensor

from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import explaining
from dp_lightning.torch_internals import tree_leaves, tree_map_only


def fails(rows):
    """What a step says that runs on one example, and not on two."""
    return None if rows == 1 else ValueError()


def clipped_gradient_sum(model, loss_fn, inputs, targets, *, clip_plan, augmult=1):
    """The sum of clipped gradients by parameter name, and the norms before clipping: (B,), or (B, L) per layer.

    Args:
        loss_fn: of the outputs and targets of an example's rows; the mean is taken where it returns several losses.
        inputs, targets: trees of tensors (B * K, ...), where the K = ``augmult`` rows of an example follow each other.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = ClippedSum(trained, clip_plan)
    examples = tree_map_only(Tensor, lambda rows: rows.unflatten(0, (-1, augmult)), (inputs, targets))
    size = len(tree_leaves(examples)[0])
    total.begin(size)
    recording = Recording(trained, size, total.take)
    with explaining(fails, lambda: "a batch of one example", together=True):
        recording.backward(recording.run(lambda x, y: loss_fn(model(x), y).mean(), *examples))
    norms = total.end()
    return total.sums, norms[:, 0] if clip_plan.kind == "flat" else norms
