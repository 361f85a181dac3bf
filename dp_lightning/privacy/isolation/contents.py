"""What tensors, NumPy arrays and random generators hold.

A version counter misses writes through ``.data``, NumPy and other views, so the numbers are compared; for large arrays,
digests are compared instead, since a copy of a model would double its memory. On a CPU the digest is XXH3 of 128 bits,
with a secret seed, at the speed of its memory.

Other devices have no such function. There, each piece of words x has as its digest the sum of w (x + floor(x / 2^29))
modulo 2^64, with a secret odd w for each place. If one number changes, so does the digest, except between one NaN and
one denormal of float64. The second term adds the high bits to lower ones: without it, a sign bit would meet only the
lowest bit of each w, and two flipped signs would cancel.
"""

import functools
import pickle
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from dp_lightning.processors import read_at_once
from dp_lightning.torch_internals import is_wrapped, version_of

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
GENERATORS: tuple[type, ...] = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
GENERATORS += (random.Random, np.random.SeedSequence)

# As integers, nan equals nan, and -0.0 differs from 0.0.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_PIECE = 4096  # words of 8 bytes per digest
_PIECES = 64  # pieces at a time: 2 MiB stay in a CPU's cache


class Contents:
    """The numbers in arrays, or digests of them."""

    def __init__(self, arrays: Sequence[Array]):
        self._arrays = arrays
        self._held: list[tuple[tuple[Any, ...], Tensor | None]] = [((), None)] * len(arrays)
        self._digests: dict[int, Tensor] = {}  # of the last comparison, by index
        self._same = False  # whether it has found them all the same
        self.hold()

    def hold(self, *, as_compared: bool = False) -> None:
        """From here on, compare with what the arrays hold now.

        Args:
            as_compared: nothing has changed an array since the last ``changed``, whose digests are taken. If something
                has, the next comparison finds it.
        """
        if as_compared and self._same:
            return
        digests, self._digests = self._digests if as_compared else {}, {}
        for index, (array, (held, then)) in enumerate(zip(self._arrays, self._held, strict=True)):
            traits, bits = _look(array)
            if bits is not None and then is not None and traits == held:
                then.copy_(digests[index] if index in digests else _summary(bits))  # faster than into new memory
            else:
                self._held[index] = traits, None if bits is None else _summary(bits).clone()

    def changed(self, unread: Callable[[Tensor, list[int]], None] | None = None) -> list[int]:
        """The indices of the arrays that hold other numbers, or have another shape or dtype.

        Args:
            unread: called for each device whose numbers are not read at once, with flags (k,) on it, whether each of k
                arrays there differs, and their indices. None reads them now.
        """
        found = []
        self._digests.clear()
        self._same, known = False, True  # whether the numbers of all devices are read now
        by_device: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for index, (array, (held, then)) in enumerate(zip(self._arrays, self._held, strict=True)):
            traits, bits = _look(array)
            if traits != held:
                found.append(index)
            elif bits is not None and then is not None:
                now = _summary(bits)
                if now is not bits:
                    self._digests[index] = now
                by_device.setdefault(bits.device, []).append((index, now, then))
        for device, there in by_device.items():
            if read_at_once(device):
                found += [index for index, now, then in there if not torch.equal(now, then)]
                continue
            indices = [index for index, _, _ in there]
            flags = torch.stack([(now != then).any() for _, now, then in there])  # torch.equal would wait for each
            if unread is None:
                found += [index for index, differs in zip(indices, flags.tolist(), strict=True) if differs]
            else:
                unread(flags, indices)
                known = False
        self._same = known and not found
        return sorted(found)


def _summary(bits: Tensor) -> Tensor:
    """The numbers themselves if they are few; otherwise a digest of them."""
    if bits.numel() * bits.itemsize < 16 * _PIECE:
        return bits
    memory = bits
    if not bits.is_contiguous():
        order = sorted(range(bits.dim()), key=bits.stride, reverse=True)
        memory = bits.permute(order).contiguous()
    return _hash(memory) if memory.device.type == "cpu" else _digests(memory)


def _hash(memory: Tensor) -> Tensor:
    """A digest of integers without gaps, of any shape: (16,) uint8."""
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(memory.numpy().data, _seed())), dtype=torch.uint8)


def _digests(memory: Tensor) -> Tensor:
    """Those of the pieces of integers without gaps, and the rest behind the last whole piece, as bytes."""
    memory = memory.view(-1).view(torch.uint8)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    whole = memory.numel() - memory.numel() % (8 * _PIECE)
    words, weights = memory[:whole].view(torch.int64).view(-1, _PIECE), _weights(memory.device)
    digests = [(rows + (rows >> 29)).mul_(weights).sum(1) for rows in words.split(_PIECES)]
    return torch.cat([torch.cat(digests).view(torch.uint8), memory[whole:]])


@functools.cache
def _seed() -> int:
    return secrets.randbits(64)


@functools.lru_cache(maxsize=64)
def _weights(device: torch.device) -> Tensor:
    words = torch.frombuffer(bytearray(secrets.token_bytes(8 * _PIECE)), dtype=torch.int64)
    return (words | 1).to(device)


def _look(array: Array) -> tuple[tuple[Any, ...], Tensor | None]:
    """What to compare by ``==``, and a view of the numbers; None if they cannot be read in place."""
    try:
        if isinstance(array, Tensor):
            return (array.shape, array.dtype, array.device, array.requires_grad), _bits(array)
        if not array.flags.writeable:
            return (array.shape,), None  # the walk follows its base
        if array.dtype.kind in "biufc" and min(array.strides, default=0) >= 0:
            with suppress(TypeError, ValueError):  # of another byte order, or at odd places
                return (array.shape, array.dtype), _bits(torch.from_numpy(array))
        return (array.shape, array.dtype, array.tobytes()), None  # for objects, these are their ids
    except Exception:  # no memory of its own, or not initialized
        return (version_of(array) if isinstance(array, Tensor) else None,), None


def _bits(tensor: Tensor) -> Tensor:
    """A view as integers. Raises if there is no memory to view: sparse, nested, meta, a wrapper of other tensors."""
    if is_wrapped(tensor) or tensor.is_nested or tensor.is_quantized or not _has_memory(tensor):
        raise RuntimeError("no memory to read")
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])


def _has_memory(tensor: Tensor) -> bool:
    return bool(tensor.data_ptr()) or not tensor.numel()


def generator_state(generator: Any) -> Any:
    """The state of a random generator of torch, NumPy or Python, as an immutable value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    if isinstance(generator, np.random.SeedSequence):
        return repr(generator.state)
    bits = getattr(generator, "bit_generator", generator)
    return pickle.dumps((bits.state, getattr(bits.seed_seq, "state", None)))
