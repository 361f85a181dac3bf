"""Warns if a loss means something else for one example than for a batch.

Private training uses each example's own loss. Where the loss of a batch is not the mean of the losses of its examples,
as with negatives from the batch, class weights of a mean, or thresholds on the batch, another function is trained than
without privacy. Such a loss leaks nothing, but the user has to know of it.
"""

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dp_lightning.privacy.reading import ExampleReader, Flat, flatten, unflatten

#: The name under which the statement lists the warning, since it tells something of raw examples.
NAME = "warning before the first step: loss of a batch"
_EXAMPLES = 8
# A relative difference that is above the rounding of a loss, in bfloat16 too.
_TOLERANCE = 0.005
# The noise in the weights at which losses are compared: a fresh network gives all classes nearly the same probability,
# and then each weighted mean of the losses is nearly the same.
_NOISE = 0.1
_CANCELS = (
    "training_step calls F.{0} with class weights and reduction='mean', which divides by the sum of the weights of all "
    "labels. A private step sees one example: if it has one label, its weight cancels, and the run trains as without "
    "weights. Write F.{0}(..., weight=weight, reduction='none').mean(), or take a classifier of this package and its "
    "setting class_weights. A gradient is clipped after it is weighted: give the rarest class the weight 1, and others "
    "less."
)


class _WeightedMeans(TorchFunctionMode):
    """Notes which function of torch divides by the sum of class weights."""

    found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            bound = inspect.signature(func).bind(*args, **kwargs or {})
            bound.apply_defaults()
            weight, target, reduction = (bound.arguments[name] for name in ("weight", "target", "reduction"))
            weighted = weight is not None and weight.unique().numel() > 1
            if weighted and reduction == "mean" and not target.is_floating_point() and target.numel() == 1:
                self.found = func.__name__
        return func(*args, **kwargs or {})


def warn_of_changed_meaning(trainer: pl.Trainer, module: pl.LightningModule, reader: ExampleReader) -> bool:
    """Compare the loss of a few examples together with the mean of their losses, in evaluation mode.

    The losses are those of a copy of the module, with noise in its weights. The batch of several examples is made of
    their batches of one, so that collation and hooks see one example, as in a step. Where two losses of that batch
    differ, or the code takes no batch of several examples or cannot be copied, nothing is compared.

    Returns:
        Whether a warning was given that tells something of the examples.
    """
    count = min(_EXAMPLES, len(reader))
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
    with isolate_rng(), torch.no_grad(), trainer.precision_plugin.train_step_context(), _WeightedMeans() as means:
        try:
            tried = copy.deepcopy(module).eval()
            tried.trainer = trainer
            vars(tried).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))
            for parameter in tried.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
            owners, hook = (getattr(trainer, "datamodule", None), tried), "on_after_batch_transfer"
            owner = next((owner for owner in owners if owner is not None and is_overridden(hook, owner)), None)
            found = [reader.read(place * len(reader) // count, 0) for place in range(count)]
            examples: list[Flat] = []
            for example in (unflatten(*flat) for flat in found if flat is not None):
                batch = trainer.precision_plugin.convert_input(move_data_to_device(example, module.device))
                examples.append(flatten(batch if owner is None else getattr(owner, hook)(batch, 0)))

            def loss_of(parts: list[Flat]) -> float:
                columns = zip(*(leaves for leaves, _ in parts), strict=True)
                leaves = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
                output: Any = tried.training_step(unflatten(leaves, parts[0][1]), *index)
                return float(output["loss"] if isinstance(output, Mapping) else output)

            mean = sum(loss_of([example]) for example in examples) / len(examples)
            together = loss_of(examples)
            differs = abs(together - mean) > _TOLERANCE * max(abs(together), abs(mean))
            differs = differs and together == loss_of(examples)
        except Exception:  # whatever the user's own code raises on a batch that it will not see
            differs = False
    if means.found is not None:
        rank_zero_warn(_CANCELS.format(means.found))
        return False
    if not differs or not math.isfinite(together):
        return False
    rank_zero_warn(
        f"With noise in the weights, the loss of {len(examples)} examples together is {together:.4g}, and the mean of "
        f"their losses is {mean:.4g}. Private training uses each example's own loss: what the loss takes from the rest "
        "of a batch, such as negatives, statistics or thresholds, comes from the example alone. Give weights, such as "
        "pos_weight, as public constants, and not as counts of the batch; take the mean of weighted losses, and not "
        "their sum over the sum of the weights."
    )
    return True
