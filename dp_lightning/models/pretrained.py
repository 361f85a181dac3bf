"""Any network of timm's registry, with an error that helps when the name or an argument is wrong.

Many of timm's networks contain BatchNorm, which private training refuses; those with ``gn`` in their name,
NFNets and vision transformers do not.
"""

import difflib
from typing import Any

from torch import nn

from dp_lightning.errors import ConfigurationError


def timm_model(
    name: str, num_classes: int, *, pretrained: bool = False, in_channels: int = 3, **kwargs: Any
) -> nn.Module:
    """Build a network of timm's registry: (N, in_channels, H, W) to logits (N, num_classes).

    Args:
        name: Name in timm's registry, such as ``vit_tiny_patch16_224`` or ``resnet50_gn``.
        num_classes: Number of logits; the head is replaced.
        pretrained: Load timm's weights; they are downloaded when absent. The weights must come from public
            data.
        in_channels: Channels of the images.
        **kwargs: Passed to the network, such as ``img_size=32`` for a vision transformer.

    Raises:
        ConfigurationError: The name is unknown, the network refuses an argument, or its weights cannot be
            loaded.
    """
    import timm  # slow to import, and only needed here

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
        raise ConfigurationError(f"timm has no model {name!r}; {hint}")
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **kwargs)
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"timm could not build {name!r}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"the pretrained weights of {name!r} could not be loaded: {error}") from error
