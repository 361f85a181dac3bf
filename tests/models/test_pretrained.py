"""Pretrained weights on a machine that cannot download them."""

import socket

import pytest
import timm

from dp_lightning.errors import ConfigurationError
from dp_lightning.models import pretrained
from dp_lightning.models.pretrained import timm_model


@pytest.mark.parametrize(
    ("found", "cached", "proxies", "unknown"),
    [
        (False, False, {}, True),
        (True, False, {}, False),
        (False, True, {}, False),
        (False, False, {"https": "p"}, False),
    ],
)
def test_weights_of_an_unknown_host_are_refused_without_retries(tmp_path, monkeypatch, found, cached, proxies, unknown):
    def address(host, port):
        if not found:
            raise OSError("Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", address)
    monkeypatch.setattr(pretrained, "getproxies", lambda: proxies)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if cached:
        (tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k").mkdir()
    tried = []
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: tried.append(name))
    if unknown:
        with pytest.raises(ConfigurationError, match="this machine has no network") as error:
            timm_model("vit_tiny_patch16_224", 3, pretrained=True)
        assert "https://huggingface.co/timm/vit_tiny" in str(error.value)
    else:
        timm_model("vit_tiny_patch16_224", 3, pretrained=True)
    assert tried == ([] if unknown else ["vit_tiny_patch16_224"])
