"""The networks: sizes as published, shapes, and no mixing of examples."""

import pytest
import torch
import torchvision
from torch import nn

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.models import ResNet, SmallCNN, WideResNet, timm_model


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


NETWORKS = {
    "wide_resnet": (lambda: WideResNet(10, 1, 7, in_channels=1), (1, 28, 28)),
    "wide_resnet_de_et_al": (lambda: WideResNet(10, 2, 7, weight_standardization=True, relu_first=True), (3, 32, 32)),
    "wide_resnet_scale_norm": (lambda: WideResNet(10, 1, 7, scale_norm=True), (3, 32, 32)),
    "resnet18_imagenet": (lambda: ResNet(18, 7), (3, 64, 64)),
    "resnet18_cifar": (lambda: ResNet(18, 7, stem="cifar", in_channels=1), (1, 16, 16)),
    "small_cnn": (lambda: SmallCNN(7, in_channels=3, image_size=28, channels=8), (3, 28, 28)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_of_one_example_do_not_depend_on_its_batch(name):
    make, shape = NETWORKS[name]
    model = make()
    images = torch.randn(3, *shape)
    together = model(images)
    with torch.no_grad():
        alone = torch.cat([model(image.unsqueeze(0)) for image in images])
    assert together.shape == (3, 7)
    # float32 convolutions of another batch size may add in another order.
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    together.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    assert not any(getattr(part, "inplace", False) for part in model.modules())


@pytest.mark.parametrize(
    ("depth", "width", "published"),
    # Zagoruyko and Komodakis 2016 give millions to one digit: 2.7, 8.9, 36.5. BatchNorm has as many as GroupNorm.
    [(16, 4, 2_748_890), (40, 4, 8_949_210), (28, 10, 36_479_194)],
)
def test_wide_resnets_have_the_published_number_of_parameters(depth, width, published):
    with torch.device("meta"):
        assert num_parameters(WideResNet(depth, width, 10)) == published


@pytest.mark.parametrize("relu_first", [False, True])
def test_the_order_of_relu_and_norm_is_as_asked(relu_first):
    model, inputs, received = WideResNet(10, 1, 7, relu_first=relu_first), [], []
    model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.classifier.register_forward_pre_hook(lambda _, args: received.append(args[0]))
    model(torch.randn(2, 3, 32, 32))
    expected = model.norm(inputs[0]) if relu_first else model.norm(inputs[0]).relu()
    torch.testing.assert_close(received[0], expected.mean((2, 3)))
    assert bool((inputs[0] >= 0).all()) == relu_first


def test_a_network_with_scale_norm_is_the_plain_one_where_it_changes_nothing():
    plain, scaled = WideResNet(16, 1, 7).eval(), WideResNet(16, 1, 7, scale_norm=True).eval()
    assert not scaled.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    images = torch.randn(2, 3, 32, 32)
    before = scaled(images)
    norms = [name for name, _ in scaled.named_modules() if name.endswith("scale_norm")]
    assert len(norms) == 6
    for name in norms:
        scaled.set_submodule(name, nn.Identity())
    torch.testing.assert_close(scaled(images), plain(images))
    assert (before - plain(images)).abs().max() > 0.01


@pytest.mark.parametrize("depth", [18, 50])
def test_resnets_have_torchvisions_number_of_parameters(depth):
    with torch.device("meta"):
        expected = num_parameters(getattr(torchvision.models, f"resnet{depth}")(num_classes=10))
        assert num_parameters(ResNet(depth, 10)) == expected
        # The stem for small images has 3x3 instead of 7x7 kernels, 64 x 3 of them.
        assert num_parameters(ResNet(depth, 10, stem="cifar")) == expected - 64 * 3 * (49 - 9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WideResNet(17, 4, 10), "depth must be 6n \\+ 4"),
        (lambda: ResNet(18, 10, stem="small"), "stem imagenet or cifar, not 18 and 'small'"),
        (lambda: ResNet(34, 10), "depth must be 18 or 50"),
    ],
)
def test_impossible_shapes_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [("resnet5_gn", {}, "no model 'resnet5_gn'"), ("resnet50_gn", {"depths": 3}, "could not build 'resnet50_gn'")],
)
def test_what_timm_cannot_build_is_named(name, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        timm_model(name, 10, **settings)


def test_standardised_weights_start_as_those_of_de_et_al():
    torch.manual_seed(0)
    network = WideResNet(16, 4, 100, weight_standardization=True)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and parameter.numel() > 2000:
            assert float(parameter.std() * parameter[0].numel() ** 0.5) == pytest.approx(1.0, abs=0.05), name
    assert float(network.classifier.weight.abs().max()) <= 2 * 256**-0.5 / 0.8796
    assert not network.classifier.bias.any()
