"""What a checkpoint of a private run says, and which ones a run may go on from."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from dp_lightning.checksums import fingerprint
from dp_lightning.errors import ConfigurationError
from dp_lightning.ranks import Ranks


def count_logical_steps(checkpoint: dict[str, Any], num_steps: int) -> None:
    """Replace the counters of physical batches, whose number follows the realized draws and is not protected.

    Args:
        checkpoint: as Lightning is about to save it; changed in place.
        num_steps: logical steps in the ledger.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loop.get("epoch_loop.automatic_optimization.optim_progress", {})
    for counter in (loop.get("epoch_loop.batch_progress"), progress.get("optimizer", {}).get("zero_grad")):
        for part in ("total", "current"):
            if counter is not None and part in counter:
                counter[part] = dict.fromkeys(counter[part], num_steps)


def saved_steps(state: dict[str, Any]) -> int:
    """Steps in the ledger of a saved ``PrivacyCallback.state_dict``."""
    return sum(run[2] for run in state.get("ledger", {}).get("runs", []))


def require_counted_steps(trainer: pl.Trainer, checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """Refuse to train on from steps that no ledger counts, and from a file that Lightning has picked up by its name.

    Args:
        state: what ``PrivacyCallback.state_dict`` has left in it; empty where there is none.

    Raises:
        ConfigurationError: with what to do instead.
    """
    name = Path(trainer.ckpt_path or "").name
    if name.startswith("hpc_ckpt_"):
        raise ConfigurationError(
            f"Under SLURM Lightning goes on from any hpc_ckpt_*.ckpt in trainer.default_root_dir, and {name} may be "
            "another job's. Move it away for a new run, or give it another name and pass it as ckpt_path."
        )
    counted = saved_steps(state)
    if checkpoint.get("global_step", 0) > counted:
        raise ConfigurationError(
            f"The checkpoint has taken {checkpoint['global_step']} steps and its ledger holds {counted}: what the "
            "other steps spent is unknown. Resume from a checkpoint of a private run, or load its weights into a "
            "new run if they come from public data."
        )


def require_one_checkpoint(trainer: pl.Trainer, ranks: Ranks) -> None:
    """All ranks go on from the same checkpoint, or none from any; every rank has to call it.

    Raises:
        ConfigurationError: on every rank, where they do not.
    """
    mark = None if trainer.ckpt_path is None else fingerprint(Path(trainer.ckpt_path))
    if ranks.differing_facts({"checkpoint": mark}, trainer.strategy.root_device):
        raise ConfigurationError(
            f"The ranks go on from different checkpoints; rank {ranks.rank} from {trainer.ckpt_path}. Give ckpt_path "
            "a file that every node sees, and start all of them with the same settings."
        )
