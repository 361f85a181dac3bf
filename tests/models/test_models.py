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
    "wide_resnet": (lambda: WideResNet(10, 1, 7), (3, 32, 32)),
    "wide_resnet_gray_28": (lambda: WideResNet(10, 1, 7, in_channels=1), (1, 28, 28)),
    "wide_resnet_de_et_al": (lambda: WideResNet(10, 2, 7, weight_standardization=True, relu_first=True), (3, 32, 32)),
    "wide_resnet_64": (lambda: WideResNet(10, 2, 7), (3, 64, 64)),
    "resnet18_imagenet": (lambda: ResNet(18, 7), (3, 64, 64)),
    "resnet18_cifar": (lambda: ResNet(18, 7, stem="cifar", in_channels=1), (1, 28, 28)),
    "wide_resnet_scale_norm": (lambda: WideResNet(10, 1, 7, scale_norm=True), (3, 32, 32)),
    "resnet18_scale_norm": (lambda: ResNet(18, 7, stem="cifar", scale_norm=True), (3, 32, 32)),
    "small_cnn": (lambda: SmallCNN(7), (1, 8, 8)),
    "small_cnn_28": (lambda: SmallCNN(7, in_channels=3, image_size=28, channels=8), (3, 28, 28)),
    "timm_vit": (
        lambda: timm_model("vit_tiny_patch16_224", 7, in_channels=1, img_size=16, patch_size=8, depth=1, embed_dim=24),
        (1, 16, 16),
    ),
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
    ("depth", "width", "num_classes", "published"),
    # Zagoruyko and Komodakis 2016 give millions to one digit: 2.7, 8.9, 36.5. BatchNorm has as many as GroupNorm.
    [(16, 4, 10, 2_748_890), (40, 4, 10, 8_949_210), (28, 10, 10, 36_479_194), (28, 10, 100, 36_536_884)],
)
def test_wide_resnets_have_the_published_number_of_parameters(depth, width, num_classes, published):
    assert num_parameters(WideResNet(depth, width, num_classes)) == published


def test_standardised_weights_are_those_of_the_formula():
    model = WideResNet(10, 2, 7, weight_standardization=True)
    assert num_parameters(model) - num_parameters(WideResNet(10, 2, 7)) == 2 * sum(
        module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)
    )
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for name, stride in (("conv1", 2), ("shortcut", 2)):
        conv = getattr(model.blocks[1], name).double()
        conv.gain.data.uniform_(0.5, 2.0)
        rows = conv.weight.flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        scaled = centred / centred.norm(dim=1, keepdim=True) * conv.gain.flatten(1)
        x = images.repeat(1, 11, 1, 1)[:, : conv.in_channels]
        expected = nn.functional.conv2d(x, scaled.view_as(conv.weight), conv.bias, stride, conv.padding)
        # Its eps of 1e-6 is small against the variance of a row.
        torch.testing.assert_close(conv(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("relu_first", [False, True])
def test_the_order_of_relu_and_norm_is_as_asked(relu_first):
    model = WideResNet(10, 1, 7, relu_first=relu_first)
    inputs, outputs, received = [], [], []

    def norm_saw(module, args, output):
        inputs.append(args[0])
        outputs.append(output)

    def classifier_saw(module, args):
        received.append(args[0])

    model.norm.register_forward_hook(norm_saw)
    model.classifier.register_forward_pre_hook(classifier_saw)
    model(torch.randn(2, 3, 32, 32))
    relu = nn.functional.relu
    expected = outputs[0] if relu_first else relu(outputs[0])
    torch.testing.assert_close(received[0], expected.mean((2, 3)))
    assert bool((inputs[0] >= 0).all()) == relu_first


def scale_norms(model):
    return {name: part for name, part in model.named_modules() if name.endswith("scale_norm")}


def test_scale_norm_is_one_norm_more_for_each_addition():
    assert num_parameters(WideResNet(16, 4, 10, scale_norm=True)) == 2_748_890 + 2 * 2 * (64 + 128 + 256)
    for model, blocks in ((WideResNet(16, 4, 10, scale_norm=True), 6), (ResNet(18, 10, scale_norm=True), 8)):
        assert len(scale_norms(model)) == blocks
    assert len(scale_norms(ResNet(50, 10, scale_norm=True))) == 16


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda **more: WideResNet(16, 1, 7, **more), (3, 32, 32)),
        (lambda **more: WideResNet(16, 1, 7, relu_first=True, weight_standardization=True, **more), (3, 32, 32)),
        (lambda **more: ResNet(18, 7, **more), (3, 32, 32)),
        (lambda **more: ResNet(50, 7, **more), (3, 32, 32)),
    ],
)
def test_a_network_with_scale_norm_is_the_plain_one_where_it_changes_nothing(make, shape):
    plain, scaled = make().eval(), make(scale_norm=True).eval()
    assert not scaled.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    images = torch.randn(2, *shape)
    before = scaled(images)
    norms = scale_norms(scaled)
    for name in norms:
        scaled.set_submodule(name, nn.Identity())
    torch.testing.assert_close(scaled(images), plain(images))
    assert (before - plain(images)).abs().max() > 0.01


@pytest.mark.parametrize("num_classes", [10, 1000])
@pytest.mark.parametrize("depth", [18, 50])
def test_resnets_have_torchvisions_number_of_parameters(depth, num_classes):
    with torch.device("meta"):
        expected = num_parameters(getattr(torchvision.models, f"resnet{depth}")(num_classes=num_classes))
        assert num_parameters(ResNet(depth, num_classes)) == expected
        # The stem for small images has 3x3 instead of 7x7 kernels, 64 x 3 of them.
        assert num_parameters(ResNet(depth, num_classes, stem="cifar")) == expected - 64 * 3 * (49 - 9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WideResNet(17, 4, 10), "depth must be 6n \\+ 4"),
        (lambda: WideResNet(4, 4, 10), "depth must be 6n \\+ 4"),
        (lambda: ResNet(18, 10, stem="small"), "stem imagenet or cifar, not 18 and 'small'"),
        (lambda: ResNet(34, 10), "depth must be 18 or 50"),
    ],
)
def test_impossible_shapes_are_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()


def test_an_unknown_timm_name_suggests_close_ones():
    with pytest.raises(ConfigurationError, match=r"no model 'resnet5_gn'; did you mean resnet50_gn"):
        timm_model("resnet5_gn", 10)
    with pytest.raises(ConfigurationError, match=r"timm.list_models\(\) lists"):
        timm_model("?????????", 10)


def test_standardised_weights_start_as_those_of_de_et_al():
    torch.manual_seed(0)
    network = WideResNet(16, 4, 100, weight_standardization=True)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and parameter.numel() > 2000:
            assert float(parameter.std() * parameter[0].numel() ** 0.5) == pytest.approx(1.0, abs=0.05), name
    assert float(network.classifier.weight.abs().max()) <= 2 * 256**-0.5 / 0.8796
    assert not network.classifier.bias.any()
