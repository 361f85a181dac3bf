"""YAML and JSON that somebody else may have written: bounded in size, depth and aliases before they are parsed.

A YAML alias stands for all of what it names, so a file of a kilobyte may stand for more than memory holds, and a text
of brackets alone may nest deeper than Python's stack. No configuration comes near these bounds.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import DataError

#: Characters of a YAML text. The largest of `configs/` has two thousand.
LARGEST_YAML = 2**20
#: Values in it, each alias counted with all that it stands for.
MOST_VALUES = 20_000
#: Levels of nesting. Whoever reads a configuration calls some ten functions for each, and Python allows a thousand.
DEEPEST = 40
#: Bytes of a JSON file. A statement has some thousand.
LARGEST_JSON = 2**24

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnusableYaml(yaml.YAMLError):
    """A YAML text that is not read: its values are impossible, or it is beyond the bounds."""


def load_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """What ``load`` makes of a YAML text within the bounds.

    Raises:
        yaml.YAMLError: for any other text, whatever ``load`` has against it.
    """
    try:
        _check(text)
        return load(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # a date or a number that does not exist, for which PyYAML has no error of its own
        raise UnusableYaml(f"a value cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _check(text: str) -> None:
    """Follow the text's events, without building what they say."""
    if len(text) > LARGEST_YAML:
        raise UnusableYaml(f"it has {len(text):,} characters; at most {LARGEST_YAML:,} are read")
    named: dict[str, tuple[int, int]] = {}  # values and levels of what anchors name
    around: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # the open collections: anchor, values, levels so far
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            around.append((event.anchor, 1, 0))
            values, levels = 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, levels = around.pop()
            levels += 1
            if anchor is not None:
                named[anchor] = values, levels
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in named:
                raise UnusableYaml(f"the alias *{event.anchor} stands for nothing, or for what it is a part of")
            values, levels = named[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            values, levels = 1, 0
            if event.anchor is not None:
                named[event.anchor] = values, levels
        else:
            continue
        anchor, before, deepest = around[-1]
        around[-1] = anchor, before + values, max(deepest, levels)
        if before + values > MOST_VALUES:
            raise UnusableYaml(f"it stands for more than {MOST_VALUES:,} values, aliases written out")
        if len(around) - 1 + levels > DEEPEST:
            raise UnusableYaml(f"it is nested deeper than {DEEPEST} levels")


def read_text(path: Path, *, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes, in UTF-8.

    Raises:
        OSError: where it cannot be read.
        DataError: where it is no such file; the message names it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer would wait
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path} is no regular file.")
        content = file.read(most + 1) if facts.st_size <= most else b""
    if facts.st_size > most or len(content) > most:
        raise DataError(f"{path} has {facts.st_size:,} bytes; a text of at most {most:,} is expected there.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: where it cannot be read.
        DataError: where it is no JSON, too large, or nested too deeply; the message names it.
    """
    text = read_text(path, most=LARGEST_JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({str(error)[:200]}).") from error
