"""The processes that train together, and their collectives."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor

T = TypeVar("T")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; they are the default process group of torch.distributed.

    Args:
        rank: number of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def add_up(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks, which is the same on each of them bit for bit."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def of_rank_0(self, value: T) -> T:
        """The value that rank 0 has; every rank has to call it."""
        if self.size == 1:
            return value
        shared = [value]
        torch.distributed.broadcast_object_list(shared)
        return shared[0]

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors that are not the same on every rank; every rank has to call it.

        It compares two checksums of their bits, the second one weighted by position.
        """
        if self.size == 1 or not tensors:
            return []
        sums = torch.stack([_checksums(tensor) for tensor in tensors.values()])
        extremes = torch.stack([sums, -sums])
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        unequal = (extremes[0] != -extremes[1]).any(dim=1).tolist()
        return [name for name, differs in zip(tensors, unequal, strict=True) if differs]

    def differing_facts(self, facts: Mapping[str, object], device: torch.device) -> list[str]:
        """Names of the facts whose ``repr`` is not the same on every rank; every rank has to call it."""
        digests = {
            name: int.from_bytes(hashlib.sha256(repr(fact).encode()).digest()[:7]) for name, fact in facts.items()
        }
        return self.differing({name: torch.tensor(digest, device=device) for name, digest in digests.items()})


def _checksums(tensor: Tensor) -> Tensor:
    numbers = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = numbers.contiguous().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    places = torch.arange(len(bits), device=bits.device) % 65521 + 1
    return torch.stack([bits.sum(), (bits * places).sum()])
