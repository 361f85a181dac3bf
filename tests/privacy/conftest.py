"""What tests of the mechanism have in common."""

import contextlib

import pytest
import torch

from dp_lightning.privacy import lineage
from dp_lightning.privacy.isolation import contents, later
from dp_lightning.ranks import Ranks


@pytest.fixture
def reads(monkeypatch):
    """The reads of the device that were made on purpose: how many tensors each."""
    made = []

    def on_cpu(tensors):
        made.append(len(tensors))
        # As of a step in which nothing has changed and one rank has added noise.
        return [
            torch.tensor([1.0, 0.0, 0.0])
            if tensor.shape == (3,) and tensor.is_floating_point()
            else torch.zeros(tensor.shape, dtype=tensor.dtype)
            for tensor in tensors
        ]

    monkeypatch.setattr(later, "on_cpu", on_cpu)
    monkeypatch.setattr(contents, "_has_memory", lambda tensor: True)
    monkeypatch.setattr(lineage, "_is_readable", lambda tensor: tensor.layout is torch.strided)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensor: None)
    return made
