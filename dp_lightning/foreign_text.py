"""YAML and JSON files that a person or another program may have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import DataError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may be repeated


class RepeatedKey(yaml.YAMLError):
    """A YAML text with a key twice in one mapping: YAML forbids it, and PyYAML drops the first without a word."""


def load_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """The result of ``load`` for a YAML text in which no mapping has a key twice.

    Raises:
        yaml.YAMLError: for any other text, and for any error of ``load``, such as an invalid date.
    """
    try:
        for document in yaml.compose_all(text, Loader=_Loader):
            _require_single_keys(document)
        return load(text)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read ({error})") from error


def _require_single_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _require_single_keys(item)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            line = key.start_mark.line + 1
            if (first := lines.get(key.value)) is not None:
                where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                raise RepeatedKey(f"it has {key.value!r} twice, {where}; keep one")
            lines[key.value] = line
        _require_single_keys(value)


def printable(text: str) -> str:
    """The text on one line of a terminal: control characters and invalid bytes are shown as escapes such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: if it cannot be read.
        DataError: if it is not in UTF-8; the message names it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        DataError: if it is not JSON; the message names it.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}).") from error
