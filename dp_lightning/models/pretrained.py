"""Any network of timm's registry, with an error that helps when the name or an argument is wrong.

Many of timm's networks contain BatchNorm, which private training refuses; those with ``gn`` in their name,
NFNets and vision transformers do not.
"""

import difflib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from torch import nn

from dp_lightning.errors import ConfigurationError

_LOADS: ContextVar[bool] = ContextVar("loads", default=True)


@contextmanager
def without_weights() -> Iterator[None]:
    """Networks made inside are drawn at random: their weights come from a checkpoint afterwards."""
    token = _LOADS.set(False)
    try:
        yield
    finally:
        _LOADS.reset(token)


def timm_model(
    name: str,
    num_classes: int,
    *,
    pretrained: bool = False,
    weights: str | None = None,
    in_channels: int = 3,
    **kwargs: Any,
) -> nn.Module:
    """Build a network of timm's registry: (N, in_channels, H, W) to logits (N, num_classes).

    Args:
        name: Name in timm's registry, such as ``vit_tiny_patch16_224`` or ``resnet50_gn``.
        num_classes: Number of logits; the head is replaced.
        pretrained: Load timm's weights; they are downloaded when absent. The weights must come from public
            data.
        weights: File with the weights of this network in timm's names (.safetensors, .pth or .bin), loaded instead
            of a download.
        in_channels: Channels of the images.
        **kwargs: Passed to the network, such as ``img_size=32`` for a vision transformer.

    Raises:
        ConfigurationError: The name is unknown, the network refuses an argument, or its weights cannot be
            loaded.

    The head of another number of classes is drawn at random.
    """
    import timm  # slow to import, and only needed here

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
        raise ConfigurationError(f"timm has no model {name!r}; {hint}")
    if not _LOADS.get():
        pretrained, weights = False, None
    if weights is not None and not Path(weights).is_file():
        raise ConfigurationError(f"weights {weights} is not a file; give the path of the network's weights")
    try:
        if weights is not None:
            return _with_weights(name, num_classes, weights, in_chans=in_channels, **kwargs)
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **kwargs)
    except (TypeError, RuntimeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigurationError(f"timm could not build {name!r}: {error}") from error
    except (OSError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"the pretrained weights of {name!r} could not be loaded: {error}") from error


def _with_weights(name: str, num_classes: int, path: str, **kwargs: Any) -> nn.Module:
    """The network with all weights of the file, and a new head where that of the file has other classes.

    timm is strict only where the head is the file's; for another number of classes it passes over what does not match.
    """
    import timm

    saved = timm.models.load_state_dict(path)
    fresh: Any = timm.create_model(name, **kwargs)
    head = fresh.pretrained_cfg.get("classifier")
    # Distilled networks have two heads.
    weight = saved.get(f"{head if isinstance(head, str) or head is None else head[0]}.weight")
    classes = 0 if weight is None else len(weight)
    overlay = {"file": path, "num_classes": classes}
    model: Any = timm.create_model(name, pretrained=True, num_classes=classes, pretrained_cfg_overlay=overlay, **kwargs)
    if num_classes != classes:
        model.reset_classifier(num_classes)
    return cast(nn.Module, model)
