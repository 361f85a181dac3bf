"""Attacks are many short runs: one thread each, and without what was there before to be looked through each time."""

import gc

import lightning.pytorch  # noqa: F401
import pytest
import torch
import torchmetrics  # noqa: F401

import dp_lightning.callbacks  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def _short_runs():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    gc.collect()
