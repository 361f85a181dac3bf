"""The user's loader under Poisson sampling."""

import pytest
import torch
from plain_run import N, Plain, examples, loader, parameters_after, privacy, trainer, without_noise
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from dp_lightning.errors import ConfigurationError


def test_a_sampler_of_the_users_own_is_refused(tmp_path):
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(N), N)
    with pytest.raises(ConfigurationError, match="WeightedRandomSampler"):
        trainer(tmp_path, privacy()).fit(Plain(), DataLoader(examples(), sampler=weighted, batch_size=7))


@pytest.mark.parametrize(
    "kwargs", [{}, {"shuffle": True}, {"sampler": BatchSampler(SequentialSampler(range(N)), 4, False)}]
)
def test_a_loader_that_makes_no_batches_is_refused(tmp_path, kwargs):
    dataloader = DataLoader(examples(), batch_size=None, **kwargs)
    with pytest.raises(ConfigurationError, match=r"batch_size=None.*give the loader a batch_size"):
        trainer(tmp_path, privacy()).fit(Plain(), dataloader)


def test_worker_processes_deliver_the_same_batches(tmp_path):
    torch.manual_seed(0)
    module = Plain()
    trainer(tmp_path, without_noise(max_physical_batch_size=6)).fit(
        module, loader(num_workers=2, persistent_workers=True)
    )
    found = torch.cat([p.detach().flatten() for p in module.parameters()])
    expected = parameters_after(tmp_path, without_noise(max_physical_batch_size=6))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
