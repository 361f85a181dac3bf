"""Which weights a statement speaks of, and which tensors a checkpoint has been saved with."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 of the tensors of a state dict, with their names; their order does not matter."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if isinstance(tensor, Tensor):
            found.update(f"{name} {fingerprint(tensor)}\n".encode())
    return found.hexdigest()


def fingerprint(tensor: Tensor) -> str:
    """SHA-256 of a tensor's numbers, with their dtype and shape; how they lie in memory does not matter."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def fingerprints_in(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of each tensor in a checkpoint, by its place.

    Training resumes from all of them: momentum reaches the weights with the next step, and an average is evaluated.
    """
    found, _ = tree_flatten_with_path(checkpoint)
    return {keystr(place): fingerprint(tensor) for place, tensor in found if isinstance(tensor, Tensor)}


def changed_tensors(checkpoint: Mapping[str, Any]) -> str | None:
    """Which tensors the run has not saved in this checkpoint, in words; None for none.

    What a checkpoint lacks is no change, since a copy that is saved after an evaluation has no optimizer. Nothing is
    said of a checkpoint that no private run has saved, nor of one without fingerprints: resuming refuses that one.
    """
    saved = checkpoint.get("callbacks", {}).get("PrivacyCallback")
    if not isinstance(saved, dict) or "fingerprints" not in saved:
        return None
    known = saved["fingerprints"] if isinstance(saved["fingerprints"], dict) else {}
    names = [place for place, mark in fingerprints_in(checkpoint).items() if known.get(place) != mark]
    if not names:
        return None
    return (
        f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} changed after the run saved it, so the "
        "statement does not hold for it"
    )
