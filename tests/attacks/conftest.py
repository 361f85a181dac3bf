"""Attacks are many short runs: one thread each, and nothing that is left of the run before."""

import gc

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _short_runs():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    gc.collect()
