"""What a file of weights says of itself: the statement of `dpl export`, or the recipe of `dpl pretrain`."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dp_lightning.errors import DataError
from dp_lightning.privacy.statement import STATEMENT, PrivacyStatement
from dp_lightning.privacy.weights import digest_of

# Bytes of the number, at the beginning of a safetensors file, that is its header's length; tensors begin at a multiple.
_LENGTH = 8
#: Where the metadata has the facts that stand in `model.json` too.
FACTS = "facts"
#: Where it has the recipe by which `dpl pretrain` has made the weights.
RECIPE = "recipe"
#: Where it has the digest of those weights.
TENSORS = "tensors"
#: Where it has what those weights come from, in words.
SOURCE = "source"
#: These words.
RANDOM_IMAGES = "images from random processes: no private data, no photographs"


def statement_of(file: str | Path) -> PrivacyStatement | None:
    """The statement of the tensors in a safetensors file; None where it has none.

    Raises:
        DataError: where it cannot be read, or speaks of other tensors.
    """
    said = metadata_of(file).get(STATEMENT)
    if said is None:
        return None
    try:
        claims = PrivacyStatement.from_dict(json.loads(said))
    except json.JSONDecodeError as error:
        raise DataError(f"it is not JSON: {error}") from error
    if claims.weights != _digest(file):
        raise DataError("it speaks of other tensors")
    return claims


def recipe_of(file: str | Path) -> str | None:
    """The SHA-256 of the recipe in a safetensors file; None where it has none, or names another source of its weights.

    Raises:
        DataError: where it is no such file, or its tensors are not those that the recipe has made.
    """
    said = metadata_of(file)
    if (recipe := said.get(RECIPE)) is None or said.get(SOURCE) != RANDOM_IMAGES:
        return None
    if said.get(TENSORS) != _digest(file):
        raise DataError(f"{file} has other tensors than those that its recipe has made. Run dpl pretrain anew.")
    return hashlib.sha256(recipe.encode()).hexdigest()


def _digest(file: str | Path) -> str:
    """That of the tensors in a safetensors file."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return digest_of({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118


def with_metadata(tensors: Mapping[str, Tensor], said: Mapping[str, str]) -> bytes:
    """A safetensors file of tensors and what it says of itself; the same bytes every time, unlike the library's."""
    from safetensors.torch import save

    content = save(dict(tensors), dict(said))
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.dumps(json.loads(content[_LENGTH:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % _LENGTH)
    return len(header).to_bytes(_LENGTH, "little") + header + content[end:]


def metadata_of(file: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file.

    Raises:
        DataError: where it is none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} cannot be read as safetensors: {error}") from error
