"""Settings of the model that the command line takes from the data, whatever is set for the model."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace

from dp_lightning.commands.known_settings import content_of, options_of
from dp_lightning.errors import ConfigurationError

#: Properties of a data module, and settings of a module.
LINKED = ("num_classes", "in_channels", "image_size", "mean", "std")


def given_to_model(arguments: Sequence[str], settings: Namespace) -> dict[str, Any]:
    """Those of the linked settings that the arguments of a command, or its configurations, set themselves.

    Args:
        arguments: as the command line was given them; the parser's result also holds the defaults of the class.
        settings: what the parser made of them.
    """
    options = list(options_of(arguments))
    given = {name for name, _ in options}
    for content in [content_of(file) for name, file in options if name == "config" and file is not None]:
        model = content.get("model") if isinstance(content, dict) else None
        if isinstance(model, dict):
            init_args = model.get("init_args")
            given |= {f"model.{name}" for name in (*model, *(init_args if isinstance(init_args, dict) else ()))}
    values = settings.get("model.init_args")
    names = [name for name in LINKED if {f"model.{name}", f"model.init_args.{name}"} & given]
    return {name: values[name] for name in names if values is not None and values.get(name) is not None}


def require_those_of(data: Any, given: dict[str, Any]) -> None:
    """Refuse a value that the data module has another one for.

    Raises:
        ConfigurationError: naming the setting and both values.
    """
    for name, value in given.items():
        known = getattr(data, name, None)
        if known is not None and _plain(known) != _plain(value):
            raise ConfigurationError(
                f"model.init_args.{name} is {_plain(value)}, and the data has {_plain(known)}; leave it out: it comes "
                "from the data."
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
