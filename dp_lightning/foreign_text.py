"""YAML and JSON that somebody else may have written: size, depth and aliases are bounded before parsing.

A YAML alias stands for everything that it names, so a file of one kilobyte may expand to more than fits into memory,
and a text of brackets may nest deeper than Python's stack. No configuration comes near these bounds.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import DataError

#: Most characters of a YAML text. The largest in `configs/` has two thousand.
LARGEST_YAML = 2**20
#: Most values in it; an alias counts as everything that it stands for.
MOST_VALUES = 20_000
#: Most levels of nesting. Reading a configuration takes about ten nested calls for each, and Python allows a thousand.
DEEPEST = 40
#: Most bytes of a JSON file. A statement has a few thousand.
LARGEST_JSON = 2**24

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may be repeated
# Characters of a key that a message shows.
_LONGEST_KEY = 100


class UnusableYaml(yaml.YAMLError):
    """A YAML text that is refused: a value is invalid, or the text exceeds the bounds."""


class RepeatedKey(UnusableYaml):
    """A YAML text with a key twice in one mapping: YAML forbids it, and PyYAML drops the first without a word."""


def load_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """The result of ``load`` for a YAML text within the bounds.

    Raises:
        yaml.YAMLError: for any other text, and for any error of ``load``.
    """
    try:
        _check(text)
        for document in yaml.compose_all(text, Loader=_Loader):
            _require_single_keys(document, set())
        return load(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # such as an invalid date or number, for which PyYAML has no error of its own
        raise UnusableYaml(f"a value cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _check(text: str) -> None:
    """Follow the events of the parser, without building the values."""
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
                raise UnusableYaml(
                    f"the alias *{event.anchor} is undefined, or refers to a collection that contains it"
                )
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
            raise UnusableYaml(f"it has more than {MOST_VALUES:,} values with its aliases expanded")
        if len(around) - 1 + levels > DEEPEST:
            raise UnusableYaml(f"it is nested deeper than {DEEPEST} levels")


def _require_single_keys(node: yaml.Node | None, seen: set[int]) -> None:
    """``seen`` has the nodes that were checked: one that has aliases is checked once."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _require_single_keys(item, seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            line = key.start_mark.line + 1
            if (first := lines.get(key.value)) is not None:
                where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                raise RepeatedKey(f"it has {key.value[:_LONGEST_KEY]!r} twice, {where}; keep one")
            lines[key.value] = line
        _require_single_keys(value, seen)


def printable(text: str) -> str:
    """The text on one line of a terminal: control characters and invalid bytes are shown as escapes such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_text(path: Path, *, most: int) -> str:
    """The text of a regular file of at most ``most`` bytes, in UTF-8.

    Raises:
        OSError: if it cannot be read.
        DataError: if it is not such a file; the message names it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe without a writer would block
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path} is not a regular file.")
        content = file.read(most + 1) if facts.st_size <= most else b""
    if facts.st_size > most or len(content) > most:
        raise DataError(f"{path} has {facts.st_size:,} bytes, but at most {most:,} are read.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        DataError: if it is not JSON, too large, or nested too deeply; the message names it.
    """
    text = read_text(path, most=LARGEST_JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({str(error)[:200]}).") from error
