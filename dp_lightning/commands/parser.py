"""The parser of the training commands: no abbreviations, and one message for a setting that does not parse."""

import difflib
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser
from torch import optim
from yaml import YAMLError

from dp_lightning import datamodules, lightning_modules, postprocess
from dp_lightning.errors import ConfigurationError
from dp_lightning.foreign_text import LARGEST_YAML, load_yaml, read_text
from dp_lightning.lightning_internals import flags_of

# Imported so that YAML can give their classes by short names.
_MODULES = (datamodules, lightning_modules, postprocess, optim)
# Characters of a message. The parser repeats the value that it cannot read, which may be a whole file.
_LONGEST = 1500

_load = get_loader("yaml")
set_loader("yaml", lambda text: load_yaml(text, _load), (YAMLError,))


class StrictParser(LightningArgumentParser):
    """Refuses abbreviated and unknown settings, and names the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Read a configuration.

        Raises:
            DataError: for a file that is too large or not text.
        """
        if Path(path).is_file():  # not a pipe, which can be read only once
            read_text(Path(path), most=LARGEST_YAML)
        return super().parse_path(path, *args, **kwargs)

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
            known = {key for module in _MODULES for key in getattr(module, "__all__", dir(module)) if key[0].isupper()}
            near = difflib.get_close_matches(class_name[1], known, n=1, cutoff=0.6)
            raise ConfigurationError(
                f"There is no class '{shortened(class_name[1])}' for this setting. Give a short name from dp_lightning "
                f"or torch, or the full path, package.module.Class.{f' Did you mean {near[0]}?' if near else ''}"
            ) from ex
        if unknown is not None:
            near = difflib.get_close_matches(unknown[1], flags_of(self), n=1, cutoff=0.8)
            hint = f". Did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{shortened(message.strip())}{hint}") from ex


def shortened(message: str) -> str:
    """The message; if it is long, without its middle."""
    left_out = len(message) - _LONGEST
    if left_out <= 0:
        return message
    return f"{message[: _LONGEST // 2]} [... {left_out:,} characters ...] {message[-_LONGEST // 2 :]}"
