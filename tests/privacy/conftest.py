"""What tests of the mechanism have in common."""

import pytest
import torch
from devices import stand_in_for_a_gpu


@pytest.fixture
def gpu(monkeypatch):
    """The meta device stands in for a GPU."""
    stand_in_for_a_gpu(monkeypatch)


@pytest.fixture
def float64():
    """Tensors are made in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
