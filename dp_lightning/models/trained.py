"""Which parameters of a pretrained network are trained; all others are frozen and cost no per-example work."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from dp_lightning.errors import ConfigurationError


def train_only(model: nn.Module, head: nn.Module, patterns: Sequence[str] = ()) -> None:
    """Train only the last layer, and parameters whose name matches one of the patterns, such as ``blocks.11.*``.

    ``*.bias`` trains the biases (BiTFiT, Ben Zaken et al. 2022; Bu et al. 2022).

    Raises:
        ConfigurationError: A pattern matches no name.
    """
    model.requires_grad_(False)
    head.requires_grad_(True)
    for pattern in patterns:
        chosen = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not chosen:
            names = ", ".join(list(dict(model.named_parameters()))[:8])
            raise ConfigurationError(f"trained: no parameter's name matches {pattern!r}; the first ones are {names}")
        for parameter in chosen:
            parameter.requires_grad_(True)


def train_low_rank(model: nn.Module, head: nn.Module, *, rank: int, layers: Sequence[str] = ("*",)) -> None:
    """Train only low-rank additions to linear layers and convolutions, and the last layer (LoRA, Hu et al. 2022).

    A weight W becomes W + B A, with A of ``rank`` rows drawn at random and B zero, so that the network's outputs do not
    change at first. peft changes the model in place.

    Args:
        layers: patterns of layer names, with the wildcards * and ?; depthwise convolutions are left out.

    Raises:
        ConfigurationError: peft is not installed, or no layer's name matches a pattern.
    """
    try:
        import peft  # slow to import
    except ImportError as error:
        raise ConfigurationError(
            "trained: lora needs the package peft; install dp-lightning[finetune], or pip install peft"
        ) from error
    if rank < 1:
        raise ConfigurationError(f"lora_rank is {rank}; it must be at least 1")
    inside = set(head.modules())
    possible = [
        name
        for name, module in model.named_modules()
        if module not in inside
        and (type(module) is nn.Linear or (isinstance(module, nn.Conv2d) and module.groups == 1))
    ]
    chosen = [name for name in possible if any(fnmatchcase(name, pattern) for pattern in layers)]
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in possible):
            raise ConfigurationError(
                f"lora_layers: no layer's name matches {pattern!r}; layers are {', '.join(possible[:8])}, ..."
            )
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,  # a scale of 1
        # A regular expression, which has to match the whole name.
        target_modules="|".join(re.escape(name) for name in chosen),
    )
    peft.inject_adapter_in_model(config, model)
    head.requires_grad_(True)


def merge_low_rank(model: nn.Module) -> None:
    """Merge low-rank additions into the weights that they are added to, if there are any."""
    for name, module in list(model.named_modules()):
        # Recognises peft's layers without importing peft, which need not be installed.
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            module.merge()  # type: ignore[operator]
            model.set_submodule(name, module.get_base_layer())  # type: ignore[operator]
