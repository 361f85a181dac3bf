"""What a checkpoint says of Lightning's loops: logical steps, not physical batches."""

from typing import Any


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
