"""Warns if a loss means something else for one example than for a batch.

Private training uses each example's own loss. Where the loss of a batch is not the mean of the losses of its examples,
as with negatives from the batch, class weights of a mean, or thresholds on the batch, another function is trained than
without privacy. That is not a leak, but the user has to know it.
"""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.errors import ModelError
from dp_lightning.privacy.step import PrivateStep
from dp_lightning.private_run.public_trainer import PublicTrainer
from dp_lightning.private_run.training_step import PrivateTrainingStep

#: Under which name the statement lists the warning, which tells something of raw examples.
NAME = "warning before the first step: loss of a batch"
_EXAMPLES = 8
# Above the rounding of a loss, in bfloat16 too.
_TOLERANCE = 0.005


def warn_of_changed_meaning(
    trainer: pl.Trainer, module: pl.LightningModule, step: PrivateTrainingStep, private: PrivateStep
) -> bool:
    """Compare the loss of a few examples together with the mean of their losses, on a copy of the module.

    A copy shares globals, classes and closures with the module: what changes there is put back.
    Where the module cannot be copied, has batch transfer hooks, draws random numbers in evaluation mode, or takes no
    batch of several examples, nothing is compared.

    Returns:
        Whether a warning was given.

    Raises:
        ModelError: where the step would raise it too, or something changes that cannot be put back.
    """
    if step.has_transfer_hooks:  # Lightning calls the hooks of the module itself, which may keep what they see
        return False
    reader = private.reader
    count = min(_EXAMPLES, len(reader))
    try:
        drawn = [reader.elements(number * len(reader) // count, step=0) for number in range(count)]
        read = [[reader.dataset[element] for element in elements] for elements in drawn]
        raw = [example for example in read if not any(view is None for view in example)]
        trial = copy.deepcopy(module)
        trial.eval()
        public: Any = PublicTrainer(trainer)
        trial.trainer = public
        silence: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
        trial.__dict__.update(log=silence, log_dict=silence)

        def loss_of(elements: list[Any]) -> float:
            with reader.nothing_kept():
                collated = reader.collate_fn(elements)
            batch = move_data_to_device(collated, module.device)
            return float(step.loss_of(trial, batch))

        with torch.no_grad(), trainer.precision_plugin.train_step_context(), private.nothing_kept():
            everything = [element for example in raw for element in example]
            together, again = loss_of(everything), loss_of(everything)
            mean = sum(map(loss_of, raw)) / len(raw)
    except ModelError:  # the step would raise it too
        raise
    except Exception:  # whatever the user's own code raises on a batch that it will not see
        return False
    if together != again or abs(together - mean) <= _TOLERANCE * max(abs(together), abs(mean)):
        return False
    rank_zero_warn(
        f"The loss of {len(raw)} examples together is {together:.4g}, and the mean of their losses is {mean:.4g}. "
        "Private training uses each example's own loss: what the loss takes from the rest of a batch, such as "
        "negatives, class weights of a mean, statistics or thresholds, comes from the example alone."
    )
    return True
