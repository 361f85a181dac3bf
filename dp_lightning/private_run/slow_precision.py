"""A warning where bfloat16, which is meant to make steps faster, makes them slower."""

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.torch_internals import has_bfloat16_on_cpu


def warn_of_slow_precision(precision: object, device: torch.device) -> None:
    """Warn of bfloat16 on a device without instructions for it.

    Args:
        precision: the trainer's setting.
        device: that trains.
    """
    if str(precision).startswith("bf16") and not _multiplies_bfloat16(device):
        rank_zero_warn(
            f"trainer.precision is {precision}, and this {'GPU' if device.type == 'cuda' else 'processor'} has no "
            "instructions for bfloat16: a step can take twenty times as long as in float32. Set trainer.precision to "
            "32-true."
        )


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or has_bfloat16_on_cpu()
