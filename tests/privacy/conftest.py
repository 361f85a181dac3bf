"""What tests of the mechanism have in common."""

import pytest
from devices import stand_in_for_a_gpu


@pytest.fixture
def reads(monkeypatch):
    """The reads of the device that were made on purpose: how many tensors each."""
    return stand_in_for_a_gpu(monkeypatch)
