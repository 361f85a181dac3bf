"""The parser of the training commands: no abbreviations, and one line for a setting that does not parse."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from jsonargparse import get_loader, set_loader
from lightning.pytorch import callbacks, loggers
from lightning.pytorch.cli import LightningArgumentParser
from torch import optim
from yaml import YAMLError

from dp_lightning import datamodules, lightning_modules, postprocess
from dp_lightning.commands.parser_messages import one_line
from dp_lightning.errors import ConfigurationError
from dp_lightning.foreign_text import load_yaml
from dp_lightning.lightning_internals import flags_of
from dp_lightning.lightning_modules import schedules

# Imported so that YAML can give their classes by short names.
_MODULES = (datamodules, lightning_modules, postprocess, schedules, optim, optim.lr_scheduler, callbacks, loggers)

_load = get_loader("yaml")


def _without_empty(value: Any) -> Any:
    """Without ``init_args`` of which no line is left: a class whose settings are all comments has none."""
    if isinstance(value, dict):
        settings = ("init_args", "dict_kwargs")
        return {name: _without_empty(one) for name, one in value.items() if one is not None or name not in settings}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


set_loader("yaml", lambda text: _without_empty(load_yaml(text, _load)), (YAMLError,))


class StrictParser(LightningArgumentParser):
    """Refuses abbreviated and unknown settings, and names the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message instead of printing the usage of some hundred settings."""
        raise _RefusedError(message.strip()) from ex


class _RefusedError(ConfigurationError):
    """A message of the parser as it is. The parsers of classes within report to the one around them."""


@contextmanager
def in_one_line(parser: LightningArgumentParser) -> Iterator[None]:
    """Within this context, what the parser refuses is told in one line.

    Raises:
        ConfigurationError: naming the setting, what is wrong, and what it takes.
    """
    try:
        yield
    except _RefusedError as refused:
        names = (name for module in _MODULES for name in getattr(module, "__all__", dir(module)))
        classes = {name for name in names if name[0].isupper()}
        raise ConfigurationError(one_line(str(refused), options=flags_of(parser), classes=classes)) from refused
