"""Attacks are many short runs, of one thread each."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _short_runs():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
