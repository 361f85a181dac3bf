"""The class and the settings of the module that a checkpoint holds."""

import inspect
import pydoc
from typing import Any

import lightning.pytorch as pl


def saved_module(hyper_parameters: dict[str, Any], *, trusted: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The class, and those of the saved settings that it has arguments for.

    A checkpoint is data, and must not choose which code runs: its class is one of ours or the one that the user names.
    Lightning saves what is linked from the data, such as image_size, with modules that have no such argument too.

    Args:
        hyper_parameters: of the checkpoint.
        trusted: path of a class that the user has named.

    Returns:
        The class, None where the checkpoint names none of these, and its settings.
    """
    path = str(hyper_parameters.get("_class_path"))
    if not path.startswith("dp_lightning.") and path != trusted:
        return None, {}
    kind = pydoc.locate(path)
    if not inspect.isclass(kind) or not issubclass(kind, pl.LightningModule):
        return None, {}
    known = inspect.signature(kind).parameters
    return kind, {name: value for name, value in hyper_parameters.items() if name in known}
