"""What a file of weights says of itself: the statement of `dpl export`, or the recipe of `dpl pretrain`."""

import hashlib
import json
from pathlib import Path

from dp_lightning.errors import DataError
from dp_lightning.privacy.statement import STATEMENT, PrivacyStatement
from dp_lightning.privacy.weights import digest_of

#: The file of weights that `dpl export` writes.
EXPORTED = "model.safetensors"
# Names in the metadata: of the recipe by which `dpl pretrain` has made the weights, of their digest, and of what they
# come from, in words.
RECIPE, TENSORS, SOURCE = "recipe", "tensors", "source"
#: What the weights of `dpl pretrain` come from.
RANDOM_IMAGES = "images from random processes: no private data, no photographs"


def statement_of(file: str | Path) -> PrivacyStatement | None:
    """The statement of the tensors in a safetensors file; None where it has none.

    Raises:
        DataError: where the statement cannot be read, or is about other tensors.
    """
    said = metadata_of(file).get(STATEMENT)
    if said is None:
        return None
    try:
        claims = PrivacyStatement.from_dict(json.loads(said))
    except (json.JSONDecodeError, DataError) as error:
        raise DataError(f"{file} has a privacy statement that cannot be read ({error}). Export it anew.") from error
    if claims.weights != _digest(file):
        raise DataError(f"{file} has the privacy statement of other tensors. Export it anew.")
    return claims


def recipe_of(file: str | Path) -> str | None:
    """The SHA-256 of the recipe in a safetensors file; None where it has none, or names another source of its weights.

    Raises:
        DataError: where the file is no safetensors file, or its tensors are not those that the recipe has made.
    """
    said = metadata_of(file)
    if (recipe := said.get(RECIPE)) is None or said.get(SOURCE) != RANDOM_IMAGES:
        return None
    if said.get(TENSORS) != _digest(file):
        raise DataError(f"{file} has other tensors than those that its recipe has made. Run dpl pretrain anew.")
    return hashlib.sha256(recipe.encode()).hexdigest()


def _digest(file: str | Path) -> str:
    """The digest of the tensors in a safetensors file."""
    from safetensors.torch import load_file

    return digest_of(load_file(file))


def metadata_of(file: str | Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for a file of another suffix.

    Raises:
        DataError: where the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if Path(file).suffix != ".safetensors":
        return {}
    try:
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} cannot be read as safetensors: {error}") from error
