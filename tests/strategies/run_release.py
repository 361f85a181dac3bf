"""One step of the mechanism on one rank, for the tests."""

import os

import torch

from dp_lightning.errors import DpLightningError
from dp_lightning.privacy import ClipPlan, GaussianNoise, Ledger, PrivacyPlan, PrivateMechanism
from dp_lightning.ranks import Ranks

PLAN = PrivacyPlan(num_train=1000, expected_batch_size=50, num_steps=100, noise_multiplier=0.7, delta=1e-4)


def release(size, folder, claimed):
    """A release without gradients: leaves the noise alone, times B, or the error, in ``<rank>.pt``."""
    rank = int(os.environ.get("RANK", 0))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    mechanism = PrivateMechanism(
        {"weight": torch.zeros(500, 1000)},
        plan=PLAN,
        clip_plan=ClipPlan.flat(max_grad_norm=3.0),
        noise=GaussianNoise(),
        ledger=Ledger(),
        ranks=Ranks(rank if claimed is None else claimed, size),
    )
    mechanism.begin()
    try:
        released = mechanism.release(stop=rank == size - 1)
    except DpLightningError as error:
        result = str(error)
    else:
        result = {"noise": released.gradients["weight"] * PLAN.expected_batch_size, "stop": released.stop}
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
