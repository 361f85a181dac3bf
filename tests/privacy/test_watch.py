"""Which tensors are found that a loss may not use."""

import gc

import pytest
import torch

from dp_lightning.privacy.isolation.watch import UnknownTensors


@pytest.mark.parametrize("collected", [None, 0, 1, 2])
def test_every_tensor_is_found_however_far_the_collector_has_moved_it(collected):
    constant, before = torch.zeros(1), torch.zeros(1)
    unknown = UnknownTensors(lambda tensor: tensor is constant)
    found = unknown.tensors()
    assert id(before) in found
    assert id(constant) not in found
    for _ in range(3):  # from the youngest generation to the oldest
        after = torch.zeros(1)
        if collected is not None:
            gc.collect(collected)
        assert {id(before), id(after)} <= unknown.tensors().keys()
        before = after


def test_only_the_young_are_looked_at_until_they_are_collected(monkeypatch):
    unknown, asked, objects = UnknownTensors(lambda tensor: False), [], gc.get_objects

    def get_objects(*generation):
        asked.append(generation)
        return objects(*generation)

    gc.collect()
    gc.disable()
    try:
        unknown.tensors()
        monkeypatch.setattr(gc, "get_objects", get_objects)
        unknown.tensors()
        assert asked == [(0,), (1,)]
        gc.collect(1)
        unknown.tensors()
        assert asked == [(0,), (1,)] * 2 + [()]
    finally:
        gc.enable()


def test_a_tensor_that_is_gone_is_forgotten():
    unknown, tensor = UnknownTensors(lambda tensor: False), torch.ones(1)
    ref = unknown.tensors()[id(tensor)]
    assert ref() is tensor
    del tensor
    assert all(ref is not other for other in unknown.tensors().values())
