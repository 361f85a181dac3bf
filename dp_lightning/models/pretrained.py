"""Any network of timm's registry, with a helpful error if the name or an argument is wrong.

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

from dp_lightning.errors import ConfigurationError, ModelError

_LOADS: ContextVar[bool] = ContextVar("loads", default=True)


@contextmanager
def without_weights() -> Iterator[None]:
    """Networks built inside are initialised at random: their weights are loaded from a checkpoint afterwards."""
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
        weights: File with the weights of this network under timm's names (.safetensors, .pth or .bin), loaded instead
            of downloading them.
        in_channels: Channels of the images.
        **kwargs: Passed to the network, such as ``img_size=32`` for a vision transformer.

    Raises:
        ConfigurationError: The name is unknown, the network refuses an argument, or its weights cannot be
            loaded.

    A head for another number of classes is initialised at random.
    """
    import timm  # slow to import, and only needed here

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
        raise ConfigurationError(f"timm has no model {name!r}; {hint}")
    if not _LOADS.get():
        pretrained, weights = False, None
    try:
        if weights is not None:
            return _with_weights(name, num_classes, weights, in_chans=in_channels, **kwargs)
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **kwargs)
    except ConfigurationError:
        raise
    except (OSError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"the pretrained weights of {name!r} could not be loaded: {error} Without a network, download them "
            "elsewhere (https://huggingface.co/timm), and set weights to their file. `dpl init --backbone scattering` "
            "needs none."
        ) from error
    except (TypeError, RuntimeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigurationError(f"timm could not build {name!r}: {error}") from error


def load_weights(network: nn.Module, path: str | None) -> None:
    """Load the weights in a file, such as one of `dpl pretrain`, into a network; None leaves it as it is.

    The last layer is loaded only if the file has one for as many classes.

    Raises:
        ConfigurationError: the file cannot be read, or has another network's weights.
    """
    if path is None or not _LOADS.get():
        return
    saved = _read(path)
    last = f"{last_layer(network)}."
    own = network.state_dict()
    of_last = {name for name in own if name.startswith(last)}
    if any(name not in saved or saved[name].shape != own[name].shape for name in of_last):
        saved = {name: value for name, value in saved.items() if name not in of_last}
        saved |= {name: own[name] for name in of_last}
    try:
        network.load_state_dict(saved)
    except RuntimeError as error:
        raise ConfigurationError(f"weights {path} are not those of the network: {_short(error)}") from error


def last_layer(network: nn.Module) -> str:
    """The name of the linear layer at the end of a network.

    Raises:
        ModelError: there is none.
    """
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear or linear[-1] == "":
        raise ModelError("The network has no linear layer at its end, before which features could be taken.")
    return linear[-1]


def _short(error: RuntimeError) -> str:
    """Return the beginning of torch's message, which may list hundreds of tensors."""
    text = " ".join(str(error).split())
    return text if len(text) < 500 else f"{text[:500]} ..."


def _with_weights(name: str, num_classes: int, path: str, **kwargs: Any) -> nn.Module:
    """The network with all weights of the file, and a new head if the number of classes differs.

    timm is strict only if the head is the file's; for another number of classes it ignores what does not match.
    """
    import timm

    saved = _read(path)
    fresh: Any = timm.create_model(name, **kwargs)
    head = fresh.pretrained_cfg.get("classifier")
    # Distilled networks have two heads.
    weight = saved.get(f"{head if isinstance(head, str) or head is None else head[0]}.weight")
    classes = 0 if weight is None else len(weight)
    overlay = {"file": path, "num_classes": classes}
    try:
        model: Any = timm.create_model(
            name, pretrained=True, num_classes=classes, pretrained_cfg_overlay=overlay, **kwargs
        )
    except RuntimeError as error:
        raise ConfigurationError(f"weights {path} are not those of {name}: {_short(error)}") from error
    if num_classes != classes:
        model.reset_classifier(num_classes)
    return cast(nn.Module, model)


def _read(path: str) -> dict[str, Any]:
    import timm

    if not Path(path).is_file():
        raise ConfigurationError(f"weights {path} is not a file; give the path of the network's weights")
    try:
        return cast(dict[str, Any], timm.models.load_state_dict(path))
    except Exception as error:  # each format raises its own, and a damaged file any
        reason = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ConfigurationError(
            f"weights {path} cannot be read as weights ({reason}). Save them with torch.save(network.state_dict(), "
            "path), or as safetensors; a whole pickled network is not read, since that would run code."
        ) from error
