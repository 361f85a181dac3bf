"""A seal is the SHA-256 of all other values of a statement or a checkpoint, so that an edit of one of them shows.

It has no key: whoever edits a value can compute a new seal. But then the file no longer agrees with the run's other
files, or with a copy of the seal that is kept elsewhere.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dp_lightning.privacy.weights import fingerprint

#: Under which name a statement holds its seal.
SEAL = "seal"


def seal_of(values: Mapping[Any, Any]) -> str:
    """SHA-256 of nested plain values and tensors.

    It is the same before and after they were saved as JSON or by torch: a tuple is a list, an infinite number is the
    word, and the order of a mapping's keys does not matter. Of any other object only the type counts.
    """
    found = hashlib.sha256()
    for part in _parts(values):
        found.update(part.encode() + b"\n")
    return found.hexdigest()


def sealed(statement: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a statement, with their seal."""
    values = {name: value for name, value in statement.items() if name != SEAL}
    return {**values, SEAL: seal_of(values)}


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, np.generic):  # torch may give it back with another type of the same size
        value = value.item()
    if isinstance(value, Tensor):
        yield f"tensor {fingerprint(value if value.layout is torch.strided else value.to_dense())}"
    elif isinstance(value, Mapping):
        yield "{"
        for key in sorted(value, key=repr):
            yield repr(key)
            yield from _parts(value[key])
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for item in value:
            yield from _parts(item)
        yield "]"
    elif isinstance(value, float) and math.isinf(value):
        yield json.dumps("inf" if value > 0 else "-inf")
    elif value is None or isinstance(value, str | int | float):
        yield json.dumps(value)
    elif isinstance(value, bytes):
        yield f"bytes {value.hex()}"
    elif isinstance(value, set | frozenset):
        yield f"set {sorted(map(repr, value))}"
    elif isinstance(value, complex | PurePath | torch.dtype | torch.device):
        yield repr(value)
    else:
        yield type(value).__qualname__
