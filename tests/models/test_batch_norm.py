"""BatchNorm replaced by GroupNorm, or frozen."""

import pytest
import timm
import torch
from clipped_sums import clipped_gradient_sum
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.models import batch_norm_to_group_norm, freeze_batch_norm
from dp_lightning.models.batch_norm import batch_norms, fixed_statistics
from dp_lightning.privacy import ClipPlan


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small():
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12, eps=1e-3), nn.ReLU(), nn.Conv2d(12, 7, 3))
    model.add_module("last", nn.Sequential(nn.BatchNorm2d(7, affine=False)))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    return model


def clipped(model):
    """Takes the gradients of two examples, one by one."""
    model = nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return clipped_gradient_sum(
        model, F.cross_entropy, torch.randn(2, 3, 8, 8), torch.tensor([0, 2]), clip_plan=ClipPlan.flat()
    )


def test_scale_shift_and_eps_are_kept():
    model = small()
    scale, shift = model[1].weight, model[1].bias
    assert batch_norm_to_group_norm(model, num_groups=8) is model
    norm = model[1]
    assert type(norm) is nn.GroupNorm
    assert (norm.num_groups, norm.eps) == (3, 1e-3)
    assert norm.weight is scale
    assert norm.bias is shift
    assert model.last[0].weight is None
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))
    assert not batch_norms(model)


@pytest.mark.parametrize(
    ("channels", "groups"), [(256, 32), (64, 16), (32, 8), (24, 6), (12, 3), (10, 2), (9, 1), (7, 1), (2, 1), (1, 1)]
)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_group_has_channels_enough_for_what_is_before_it_to_learn(kind, channels, groups):
    norm = batch_norm_to_group_norm(kind(channels))
    assert (type(norm), norm.num_groups) == (nn.GroupNorm, groups)
    if channels > 2:
        x = torch.randn(1, channels, requires_grad=True)
        norm(x).pow(3).sum().backward()
        assert x.grad.view(groups, -1).norm(dim=1).min() > 1e-3


def test_a_layer_of_several_names_stays_one_layer():
    inner = nn.Sequential(nn.BatchNorm2d(4))
    model = nn.ModuleDict({"a": inner[0], "b": inner, "c": inner[0]})
    batch_norm_to_group_norm(model)
    assert type(model["a"]) is nn.GroupNorm
    assert model["a"] is model["b"][0] is model["c"]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_kinds_without_a_matching_group_norm_are_named_and_nothing_is_replaced(kind):
    norm = type("OfItsOwn", (kind,), {})(4)
    model = nn.Sequential(nn.BatchNorm2d(2), norm)
    with pytest.raises(ModelError, match=rf"'1' \({type(norm).__name__}\) is a kind of BatchNorm without"):
        batch_norm_to_group_norm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_layer_without_running_statistics_cannot_be_frozen():
    with pytest.raises(ModelError, match=r"'0' .* has no running statistics"):
        freeze_batch_norm(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))


@pytest.mark.parametrize("name", ["efficientnet_lite0", "mobilenetv3_small_050"])
def test_networks_of_timm_treat_examples_apart_then_and_keep_their_activations(name):
    model = timm.create_model(name, num_classes=5)
    activations = sum(isinstance(module, nn.ReLU | nn.ReLU6 | nn.Hardswish) for module in model.modules())
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    parameters = {name: value.shape for name, value in model.named_parameters()}
    assert len(batch_norms(model)) == norms > 10
    assert not batch_norms(batch_norm_to_group_norm(model))
    assert sum(isinstance(module, nn.ReLU | nn.ReLU6 | nn.Hardswish) for module in model.modules()) == activations
    assert {name: value.shape for name, value in model.named_parameters()} == parameters
    model.eval()  # no dropout
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-4)


def test_frozen_layers_are_allowed_and_counted_until_they_are_trained():
    model = small()
    with pytest.raises(ModelError, match=r"BatchNorm.*freeze_batch_norm"):
        clipped(model)
    assert freeze_batch_norm(model) is model
    sums, _ = clipped(model)
    assert set(sums) == {"0.0.weight", "0.0.bias", "0.3.weight", "0.3.bias"}
    assert fixed_statistics(model) == ["1", "last.0"]
    assert not model[1].weight.requires_grad
    assert model[0].training
    model.train()
    assert fixed_statistics(model) == []
    with pytest.raises(ModelError, match="BatchNorm"):
        clipped(model)
