"""Warns if a loss means something else for one example than for a batch.

Private training uses each example's own loss. Where the loss of a batch is not the mean of the losses of its examples,
as with negatives from the batch, class weights of a mean, or thresholds on the batch, another function is trained than
without privacy. Such a loss leaks nothing, but the user has to know of it.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dp_lightning.privacy.isolation import host_generators

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
    "setting class_weights."
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
            if weighted and reduction == "mean" and not target.is_floating_point():
                self.found = func.__name__
        return func(*args, **kwargs or {})


def warn_of_changed_meaning(
    trainer: pl.Trainer, module: pl.LightningModule, dataset: Any, collate_fn: Callable[[list[Any]], Any]
) -> bool:
    """Compare the loss of a few examples together with the mean of their losses, in evaluation mode.

    The losses are those of a copy of the module, with noise in its weights. Where it draws random numbers in evaluation
    mode, takes no batch of several examples or cannot be copied, nothing is compared.

    Returns:
        Whether a warning was given that tells something of the examples.
    """
    count = min(_EXAMPLES, len(dataset))
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
    with isolate_rng(), torch.no_grad(), trainer.precision_plugin.train_step_context(), _WeightedMeans() as means:
        try:
            tried = copy.deepcopy(module).eval()
            tried.trainer = trainer
            vars(tried).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))
            for parameter in tried.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
            owners = [*filter(None, [getattr(trainer, "datamodule", None)]), tried]

            def hooked(name: str, batch: Any) -> Any:
                owner = next((owner for owner in owners if is_overridden(name, owner)), None)
                return batch if owner is None else getattr(owner, name)(batch, 0)

            def loss_of(examples: list[Any]) -> float:
                batch = hooked("on_before_batch_transfer", collate_fn(examples))
                batch = trainer.precision_plugin.convert_input(move_data_to_device(batch, module.device))
                output: Any = tried.training_step(hooked("on_after_batch_transfer", batch), *index)
                return float(output["loss"] if isinstance(output, Mapping) else output)

            examples = [dataset[place * len(dataset) // count] for place in range(count)]
            generators = host_generators(), torch.get_rng_state().tolist()
            mean = sum(loss_of([example]) for example in examples) / count
            together, again = loss_of(examples), loss_of(examples)
            if generators != (host_generators(), torch.get_rng_state().tolist()):
                together = math.nan  # the next draw would give other losses
        except Exception:  # whatever the user's own code raises on a batch that it will not see
            together = again = mean = math.nan
    if means.found is not None:
        rank_zero_warn(_CANCELS.format(means.found))
        return False
    if (
        not math.isfinite(together)
        or together != again
        or abs(together - mean) <= _TOLERANCE * max(abs(together), abs(mean))
    ):
        return False
    rank_zero_warn(
        f"With noise in the weights, the loss of {count} examples together is {together:.4g}, and the mean of their "
        f"losses is {mean:.4g}. Private training uses each example's own loss: what the loss takes from the rest of a "
        "batch, such as negatives, statistics or thresholds, comes from the example alone. Give weights, such as "
        "pos_weight, as public constants, and not as counts of the batch; take the mean of weighted losses, and not "
        "their sum over the sum of the weights."
    )
    return True
