"""YAML and JSON files that a person or another program may have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import DataError

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may be repeated


def load_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """The result of ``load`` for a YAML text in which no mapping has a key twice.

    YAML forbids such a key, and PyYAML drops the first without a word.

    Raises:
        yaml.YAMLError: for any other text.
    """
    nodes = list(yaml.compose_all(text, Loader=_Loader))
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                nodes.append(value)
                line = key.start_mark.line + 1
                if str(key.value) in lines and key.tag != _MERGE:
                    first = lines[str(key.value)]
                    raise yaml.YAMLError(f"it has {key.value!r} twice, in lines {first} and {line}; keep one")
                lines[str(key.value)] = line
    return load(text)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        DataError: if it is not JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}).") from error
