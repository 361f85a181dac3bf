"""Warns if a loss means something else for one example than for a batch.

Private training uses each example's own loss. Where the loss of a batch is not the mean of the losses of its examples,
as with negatives from the batch, class weights of a mean, or thresholds on the batch, another function is trained than
without privacy. Such a loss leaks nothing, but the user has to know of it.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

#: The name under which the statement lists the warning, since it tells something of raw examples.
NAME = "warning before the first step: loss of a batch"
_EXAMPLES = 8
# A relative difference that is above the rounding of a loss, in bfloat16 too.
_TOLERANCE = 0.005


def warn_of_changed_meaning(
    trainer: pl.Trainer, module: pl.LightningModule, dataset: Any, collate_fn: Callable[[list[Any]], Any]
) -> bool:
    """Compare the loss of a few examples together with the mean of their losses, in evaluation mode.

    The losses are those of a copy of the module. Where it has batch transfer hooks, draws random numbers in evaluation
    mode, takes no batch of several examples or cannot be copied, nothing is compared.

    Returns:
        Whether a warning was given.
    """
    owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
    if any(is_overridden(f"on_{when}_batch_transfer", owner) for when in ("before", "after") for owner in owners):
        return False
    count = min(_EXAMPLES, len(dataset))
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
    with isolate_rng(), torch.no_grad(), trainer.precision_plugin.train_step_context():
        try:
            tried = copy.deepcopy(module).eval()
            tried.trainer = trainer
            vars(tried).update(dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None))

            def loss_of(examples: list[Any]) -> float:
                batch = move_data_to_device(collate_fn(examples), module.device)
                output: Any = tried.training_step(trainer.precision_plugin.convert_input(batch), *index)
                return float(output["loss"] if isinstance(output, Mapping) else output)

            examples = [dataset[place * len(dataset) // count] for place in range(count)]
            together, again = loss_of(examples), loss_of(examples)
            mean = sum(loss_of([example]) for example in examples) / count
        except Exception:  # whatever the user's own code raises on a batch that it will not see
            return False
    if together != again or abs(together - mean) <= _TOLERANCE * max(abs(together), abs(mean)):
        return False
    rank_zero_warn(
        f"The loss of {count} examples together is {together:.4g}, and the mean of their losses is {mean:.4g}. "
        "Private training uses each example's own loss: what the loss takes from the rest of a batch, such as "
        "negatives, class weights of a mean, statistics or thresholds, comes from the example alone."
    )
    return True
