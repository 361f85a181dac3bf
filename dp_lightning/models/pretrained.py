"""Any network of timm's registry, with its weights and the images that it expects.

Many of timm's networks contain BatchNorm, which private training refuses; those with ``gn`` in their name,
NFNets and vision transformers do not.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        raise ConfigurationError(f"timm has no model {name!r}; timm.list_models() lists the names")
    if not _LOADS.get():
        pretrained, weights = False, None
    saved = None if weights is None else _read(weights)
    kwargs["in_chans"] = in_channels
    try:
        if saved is None:
            return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **kwargs)
        # timm is strict only if the head is the file's; for another number of classes it ignores what does not match.
        head = getattr(timm.get_pretrained_cfg(name), "classifier", None)
        weight = saved.get(f"{head[0] if isinstance(head, tuple) else head}.weight")  # distilled networks have two
        classes = 0 if weight is None else len(weight)
        overlay = {"file": weights, "num_classes": classes}
        model: Any = timm.create_model(
            name, pretrained=True, num_classes=classes, pretrained_cfg_overlay=overlay, **kwargs
        )
        if num_classes != classes:
            model.reset_classifier(num_classes)
        return cast(nn.Module, model)
    except (OSError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"the pretrained weights of {name!r} could not be loaded: {error} Without a network, download them "
            "elsewhere (https://huggingface.co/timm), and set weights to their file. `dpl init --backbone scattering` "
            "needs none."
        ) from error
    except (TypeError, RuntimeError, ValueError, AssertionError, KeyError) as error:
        of = "" if weights is None else f" with the weights {weights}"
        raise ConfigurationError(f"timm could not build {name!r}{of}: {shorten(str(error), 500)}") from error


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
        raise ConfigurationError(f"weights {path} are not those of the network: {shorten(str(error), 500)}") from error


def last_layer(network: nn.Module) -> str:
    """The name of the linear layer at the end of a network.

    Raises:
        ModelError: there is none.
    """
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear or linear[-1] == "":
        raise ModelError("The network has no linear layer at its end, before which features could be taken.")
    return linear[-1]


def require_weights(path: str | None) -> None:
    """Raise ConfigurationError where the file of weights that will be loaded is missing."""
    if path is not None and _LOADS.get() and not Path(path).is_file():
        raise ConfigurationError(f"weights {path} is not a file; give the path of the network's weights")


def _read(path: str) -> dict[str, Any]:
    import timm

    require_weights(path)
    try:
        return cast(dict[str, Any], timm.models.load_state_dict(path))
    except Exception as error:  # each format raises its own, and a damaged file any
        reason = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ConfigurationError(
            f"weights {path} cannot be read as weights ({reason}). Save them with torch.save(network.state_dict(), "
            "path), or as safetensors; a whole pickled network is not read, since that would run code."
        ) from error


class PretrainedInput(nn.Module):
    """Converts images of the data module to the images that the network was trained on; nothing in it is trained.

    An image x that was normalised with the data's mean m and deviation s becomes (resize(x) s + m - m') / s' with the
    network's m' and s'. Each image is converted separately.

    Args:
        size: height and width for the network; images of another size are resized (bicubic). None leaves them.
        data_mean, data_std: mean and standard deviation of the data's normalisation, one per channel or one for all.
        mean, std: those of the network's normalisation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        *,
        size: tuple[int, int] | None,
        data_mean: Sequence[float],
        data_std: Sequence[float],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.size = size
        before_mean, before_std, after_mean, after_std = (
            torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (data_mean, data_std, mean, std)
        )
        # Constants of the configuration, not part of the weights.
        self.register_buffer("scale", before_std / after_std, persistent=False)
        self.register_buffer("shift", (before_mean - after_mean) / after_std, persistent=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        in_channels: int,
        data_mean: Sequence[float],
        data_std: Sequence[float],
        size: int | None = None,
    ) -> "PretrainedInput":
        """Build it from timm's data configuration of ``model``; ``size`` replaces its height and width."""
        from timm.data import resolve_model_data_config  # timm is slow to import

        own = resolve_model_data_config(model)
        height, width = own["input_size"][1:] if size is None else (size, size)
        mean, std = own["mean"], own["std"]
        if in_channels != len(mean):
            mean, std = ((sum(values) / len(values),) for values in (mean, std))
        return cls(size=(height, width), data_mean=data_mean, data_std=data_std, mean=mean, std=std)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, *size)."""
        if self.size is not None and images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return images * self.scale + self.shift
