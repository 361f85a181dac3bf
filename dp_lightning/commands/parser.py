"""The parser of the training commands: no abbreviations, and one message for a setting that does not parse."""

import difflib
import re
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from torch import optim

from dp_lightning import datamodules, lightning_modules, postprocess
from dp_lightning.errors import ConfigurationError

# Imported, their classes are also found by their short names in YAML.
_ROOMS = (datamodules, lightning_modules, postprocess, optim)


class StrictParser(LightningArgumentParser):
    """Refuses abbreviated and unknown settings, and names the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message instead of printing the usage of some hundred settings.

        Raises:
            ConfigurationError: always.
        """
        unknown = re.search(r"unrecognized arguments: --([\w.]+)", message) or re.search(
            r"does not accept option '([\w.]+)'", message
        )
        hint = ""
        class_name = re.search(r"Expected a dot import path string: (\w+)", message)
        if class_name is not None:
            known = {key for room in _ROOMS for key in getattr(room, "__all__", dir(room)) if key[0].isupper()}
            near = difflib.get_close_matches(class_name[1], known, n=1, cutoff=0.6)
            raise ConfigurationError(
                f"There is no class '{class_name[1]}' for this setting. Give a short name of ours or torch's, or the "
                f"whole path, package.module.Class.{f' Did you mean {near[0]}?' if near else ''}"
            ) from ex
        if unknown is not None:
            near = difflib.get_close_matches(unknown[1], self._known(), n=1, cutoff=0.8)
            hint = f". Did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{message.strip()}{hint}") from ex

    def _known(self) -> set[str]:
        """Settings of this parser and of its commands."""
        commands = [action.choices.values() for action in self._actions if isinstance(action.choices, dict)]
        parsers = [self, *(parser for choices in commands for parser in choices)]
        return {option.removeprefix("--") for parser in parsers for option in parser._option_string_actions}
