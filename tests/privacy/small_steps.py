"""Private steps in a loop of plain torch."""

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.privacy import PrivacyPlan, PrivateStep

SIZE = 6


def plan_of(num_train, **numbers):
    """Each step takes every example, ten times and without noise, where ``numbers`` says nothing else."""
    usual = {"expected_batch_size": num_train, "num_steps": 10, "noise_multiplier": 0.0, "delta": 1e-3}
    return PrivacyPlan(num_train=num_train, **{**usual, **numbers})


def released(private):
    """The privatized gradient of the next step, all parameters in one tensor."""
    for batch in private.batches():
        private.accumulate(batch)
    private.release()
    return torch.cat([parameter.grad.flatten() for parameter in private.parameters.values()])


def private_step(model, shape, **settings):
    """Steps on images of zeros, each of three physical batches."""
    data = TensorDataset(torch.zeros(SIZE, *shape), torch.zeros(SIZE, dtype=torch.long))

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    settings = {"max_physical_batch_size": 2, **settings}
    return PrivateStep(model, loss, data, plan=plan_of(SIZE, noise_multiplier=1.0), **settings)
