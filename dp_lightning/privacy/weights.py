"""The digest by which a statement names its weights."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 of the tensors of a state dict, with their names, dtypes and shapes; their order does not matter."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        if isinstance(tensor, Tensor):
            numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + numbers).hexdigest()
            found.update(f"{name} {digest}\n".encode())
    return found.hexdigest()
