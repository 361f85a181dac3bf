"""Ends a run whose steps are all taken: an evaluation, a checkpoint, and the hooks of the end, without a step.

A run that was killed after its last step only has to be finished: the evaluation, the statement and the result are
missing. Steps that a crash has lost are spent, so that the weights may hold fewer than the plan.
"""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info


def finish_instead_of_training(trainer: pl.Trainer, num_steps: int) -> None:
    """Let ``trainer.fit`` end without a step.

    Args:
        trainer: in its fit, before it trains.
        num_steps: steps in the ledger.
    """

    def finish() -> None:
        loop, inner = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loop.restarting = False  # the evaluation is a whole one
        lost = num_steps - trainer.global_step
        rank_zero_info(
            f"All {num_steps} steps of the plan are taken. This fit evaluates the weights of "
            "the checkpoint and writes the statement."
            + (f" {lost} of the steps are not in these weights: they were lost, but count as spent." if lost else "")
        )
        loop.on_run_start()
        if trainer.enable_validation:
            trainer.validating = True
            inner.val_loop.run()
            trainer.training = True
        if trainer.checkpoint_callbacks:
            path = checkpoint_folder(trainer) / f"finished-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
        loop.on_run_end()

    vars(trainer.fit_loop)["run"] = finish


def train_again(trainer: pl.Trainer) -> None:
    """Undo `finish_instead_of_training`, so that a later fit of this trainer trains."""
    vars(trainer.fit_loop).pop("run", None)


def checkpoint_folder(trainer: pl.Trainer) -> Path:
    """Where the first ``ModelCheckpoint`` writes; every rank has to ask, since without one it takes a collective."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return Path(callback.dirpath)
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
