"""Whitened features have equal variances; a private run starts from those that random images gave."""

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules import ResNetModule, WideResNetModule
from dp_lightning.models.pretraining import Pretraining, Recipe, random_images
from dp_lightning.models.resnet import ResNet
from dp_lightning.models.whitening import Whitening
from dp_lightning.models.wide_resnet import WideResNet

NETWORKS = {
    "WideResNet": (lambda **more: WideResNet(10, 1, 4, **more), "whitening"),
    "ResNet": (lambda **more: ResNet(18, 4, stem="cifar", **more), "avgpool.2"),
}


def test_it_is_the_identity_until_it_is_fitted_and_then_equalizes():
    torch.manual_seed(0)
    points = torch.randn(5000, 4) * torch.tensor([10.0, 1.0, 1.0, 1e-6]) @ torch.linalg.qr(torch.randn(4, 4))[0] + 3
    layer = Whitening(4)
    assert torch.equal(layer(points), points)
    layer.fit(points)
    found = layer(points)
    torch.testing.assert_close(found.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    # v / (v + 0.03 m) for each variance v of the points, with their mean m.
    variances = torch.linalg.eigvalsh(torch.cov(points.T, correction=0))
    expected = variances / (variances + 0.03 * variances.mean())
    torch.testing.assert_close(torch.linalg.eigvalsh(torch.cov(found.T, correction=0)), expected, atol=1e-3, rtol=0)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_is_not_pretrained_is_the_same_with_it(name):
    make, layer = NETWORKS[name]
    torch.manual_seed(0)
    plain = make().eval()
    torch.manual_seed(0)
    whitened = make(whitening=True).eval()
    assert isinstance(whitened.get_submodule(layer), Whitening)
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(whitened(images), plain(images))
    assert [n for n, _ in whitened.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("name", NETWORKS)
def test_pretraining_whitens_what_the_last_layer_is_given(name):
    make, layer = NETWORKS[name]
    numbers = {"channels": 3, "size": 16, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
    recipe = Recipe(network={}, **numbers, images=40, steps=1, batch_size=4)
    images = random_images(recipe)
    training = Pretraining(make(whitening=True), recipe, images, torch.device("cpu"))
    training.step()
    weights = training.weights()
    pixels = images.float() / 255
    with torch.no_grad():
        inputs = training._inputs(training.network.get_submodule(layer), pixels)
        given = training._inputs(training._last_layer, pixels)
    torch.testing.assert_close(weights[f"{layer}.mean"], inputs.mean(0))
    torch.testing.assert_close(given.mean(0), torch.zeros_like(given[0]), atol=1e-3, rtol=0)
    assert given.var(0).max() < 1.01
    again = training.weights()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("module", "settings"), [(WideResNetModule, {"depth": 10, "width": 1}), (ResNetModule, {"stem": "cifar"})]
)
def test_a_run_takes_it_from_the_file_and_says_so_where_it_is_missing(tmp_path, module, settings):
    file = tmp_path / "weights.pt"
    made = module(4, whitening=True, **settings)
    layer = next(part for part in made.modules() if isinstance(part, Whitening))
    layer.fit(torch.randn(300, len(layer.mean)))
    torch.save(made.model.state_dict(), file)
    loaded = module(4, whitening=True, weights=str(file), **settings)
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(loaded(images), made(images))
    with pytest.raises(ConfigurationError, match=r"Unexpected key.*\.matrix"):
        module(4, weights=str(file), **settings)
    torch.save(module(4, **settings).model.state_dict(), file)
    with pytest.raises(ConfigurationError, match=r"Missing key.*\.matrix"):
        module(4, whitening=True, weights=str(file), **settings)
