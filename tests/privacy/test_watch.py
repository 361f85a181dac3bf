"""Which tensors are found that a loss may not use."""

import gc

import pytest
import torch

from dp_lightning.privacy.isolation import watch
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
    unknown, asked, every = UnknownTensors(lambda tensor: False), [], watch.all_tensors

    def all_tensors():
        asked.append("all")
        return every()

    gc.collect()
    gc.disable()
    try:
        unknown.tensors()
        monkeypatch.setattr(watch, "all_tensors", all_tensors)
        unknown.tensors()
        assert asked == []
        gc.collect(1)
        unknown.tensors()
        assert asked == ["all"]
    finally:
        gc.enable()


def test_all_tensors_are_found_by_their_classes():
    class Kind(torch.Tensor):
        pass

    kept = [torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(Kind)]
    found = {id(tensor) for tensor in watch.all_tensors()}
    assert {id(value) for value in gc.get_objects() if issubclass(type(value), torch.Tensor)} <= found
    assert all(id(tensor) in found for tensor in kept)


def test_a_tensor_that_is_gone_is_forgotten():
    unknown, tensor = UnknownTensors(lambda tensor: False), torch.ones(1)
    ref = unknown.tensors()[id(tensor)]
    assert ref() is tensor
    del tensor
    assert all(ref is not other for other in unknown.tensors().values())
