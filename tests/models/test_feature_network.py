"""The network of a probe's features: each image by itself, nothing trained, and the same one when it is made again."""

import pytest
import timm
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.models.feature_network import FeatureNetwork

NAME = "test_efficientnet"  # with BatchNorm


@pytest.fixture
def network(tmp_path):
    torch.manual_seed(0)
    torch.save(timm.create_model(NAME).state_dict(), tmp_path / "network.pth")
    return FeatureNetwork(
        NAME,
        weights=str(tmp_path / "network.pth"),
        input_size=32,
        backbone_kwargs={},
        in_channels=3,
        mean=(0.5,),
        std=(0.2,),
    )


def test_features_of_an_image_do_not_depend_on_the_others(network):
    images = torch.randn(4, 3, 16, 16)
    found = network.train()(images)
    assert found.shape == (4, network.length)
    torch.testing.assert_close(network(images[2:3]), found[2:3], rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


def test_the_same_network_is_made_from_its_settings(network):
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(FeatureNetwork(**network.settings)(images), network(images))
    with pytest.raises(ConfigurationError, match="are not those that computed the features of this run"):
        FeatureNetwork(**{**network.settings, "digest": "0" * 64})
