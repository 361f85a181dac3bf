"""A private step on images of zeros, whose logical steps have three physical batches."""

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.privacy import PrivacyPlan, PrivateStep

SIZE = 6


def private_step(model, shape, **settings):
    data = TensorDataset(torch.zeros(SIZE, *shape), torch.zeros(SIZE, dtype=torch.long))
    plan = PrivacyPlan(num_train=SIZE, expected_batch_size=SIZE, num_steps=3, noise_multiplier=1.0, delta=1e-5)

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    settings = {"max_physical_batch_size": 2, **settings}
    return PrivateStep(model, settings.pop("loss", loss), data, plan=plan, **settings)
