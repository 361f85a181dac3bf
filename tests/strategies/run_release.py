"""One step of the mechanism on one rank, for the tests."""

import os

import torch
from torch.utils.data import TensorDataset

from dp_lightning.errors import DpLightningError
from dp_lightning.privacy import ClipPlan, PrivacyPlan, PrivateStep
from dp_lightning.ranks import Ranks

PLAN = PrivacyPlan(num_train=1000, expected_batch_size=50, num_steps=100, noise_multiplier=0.7, delta=1e-4)


def release(size, folder, claimed):
    """A release of gradients that are zero: leaves the noise alone, times B, or the error, in ``<rank>.pt``."""
    rank = int(os.environ.get("RANK", 0))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    module = torch.nn.Linear(1, 500_000, bias=False)
    private = PrivateStep(
        module,
        lambda batch: 0 * module(batch[0]).sum(),
        TensorDataset(torch.ones(1000, 1)),
        plan=PLAN,
        clip_plan=ClipPlan.flat(max_grad_norm=3.0),
        max_physical_batch_size=8,
        ranks=Ranks(rank if claimed is None else claimed, size),
        seed=0,
    )
    for batch in private.batches():
        private.accumulate(batch)
    try:
        stop = private.release(stop=rank == size - 1)
    except DpLightningError as error:
        result = str(error)
    else:
        result = {"noise": module.weight.grad * PLAN.expected_batch_size, "stop": stop}
    torch.save(result, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
