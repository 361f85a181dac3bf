"""What tests of the mechanism have in common."""

import pytest
from devices import stand_in_for_a_gpu


@pytest.fixture
def gpu(monkeypatch):
    """The meta device stands in for a GPU."""
    stand_in_for_a_gpu(monkeypatch)
