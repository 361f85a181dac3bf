"""The class and the settings of the module that a checkpoint holds."""

import inspect
import pydoc
from typing import Any


def saved_module(hyper_parameters: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class, and those of the saved settings that it has arguments for.

    Lightning saves what is linked from the data, such as image_size, with modules that have no such argument too.

    Args:
        hyper_parameters: of the checkpoint.

    Returns:
        The class, None where the checkpoint names none that can be imported, and its settings.
    """
    path = hyper_parameters.get("_class_path")
    kind = None if path is None else pydoc.locate(path)
    if not inspect.isclass(kind):
        return None, {}
    known = inspect.signature(kind).parameters
    return kind, {name: value for name, value in hyper_parameters.items() if name in known}
