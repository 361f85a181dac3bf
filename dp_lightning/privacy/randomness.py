"""Keys for everything random in training: dropout, augmentation, generators of the model and of the data set.

Draws that an attacker can repeat do not protect: with a known seed, leaving out one example moves the masks of all
others. So every generator takes its key from the operating system, unless a run is explicitly reproducible; then its
keys are derived from the run's seed, and the run is not for release.

torch's generator on a CPU keeps 32 bits of a seed, which can be tried one by one, so it is given a whole state of
19,937 bits instead. Generators of other devices (Philox) take a seed of 64 bits.
"""

import functools
import random
import secrets
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dp_lightning.privacy.sampling import PhysicalBatch

Keys: TypeAlias = Callable[[int], NDArray[np.uint32]]
"""Maps a count to that many words of 32 bits, new ones with every call."""

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# A longer list holds data and no transforms.
_LONGEST = 100


def keys_from(seed: int | None, *place: int) -> Keys:
    """A source of keys for generators.

    Args:
        seed: None for the operating system.
        place: what tells this source from others with the same seed, such as the rank.
    """
    if seed is None:
        return lambda words: np.frombuffer(secrets.token_bytes(4 * words), dtype=np.uint32).copy()
    sequence = np.random.SeedSequence(seed, spawn_key=place)
    return lambda words: sequence.spawn(1)[0].generate_state(words, np.uint32).astype(np.uint32)


def host_generator(keys: Keys) -> np.random.Generator:
    """A generator of NumPy with a key of 256 bits."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(keys(8).tolist(), pool_size=8)))


class TrainingRandomness:
    """The generators that draw in a private run: the global ones, and those in attributes of the user's objects.

    Args:
        seed: None for secret keys. A number makes every physical batch, its reading and its step, a function of the
            seed and of its place, whoever reads it and however far ahead; the run is not for release.
        rank: of this process.
        owners: objects that may hold generators, in attributes, in the attributes of these and in lists of transforms.
            These generators get new keys now, so that no worker has a copy with a public one.
    """

    def __init__(self, seed: int | None = None, *, rank: int = 0, owners: Iterable[object] = ()) -> None:
        self.seed, self.rank = seed, rank
        self._own = list(_generators(owners))
        _rekey(self._own, keys_from(seed, rank))

    def before_reading(self, place: PhysicalBatch) -> None:
        """Give all generators new keys before examples are read, since data sets and hooks may use public seeds."""
        self._rekey(place, 1)

    def before_step(self, place: PhysicalBatch, example: int = 0) -> None:
        """Give all generators new keys before the losses of a physical batch, or of one example, are computed."""
        self._rekey(place, 2 + example)

    def _rekey(self, place: PhysicalBatch, use: int) -> None:
        keys = keys_from(self.seed, self.rank, place.step, place.piece, use)
        rekey_global_generators(keys)
        _rekey(self._own, keys)


def _generators(owners: Iterable[object]) -> Iterator[object]:
    """The generators within four attributes or elements of lists from the owners, each once."""
    values, seen = list(owners), set[int]()
    for _ in range(5):
        new = {id(value): value for value in values if id(value) not in seen}
        seen.update(new)
        values = []
        for value in new.values():
            if isinstance(value, _GENERATORS):
                yield value
            elif isinstance(value, list | tuple):
                values += value if len(value) <= _LONGEST else ()
            elif isinstance(value, functools.partial):
                values += (*value.args, *value.keywords.values())
            elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
                values += vars(value).values()


def rekey_global_generators(keys: Keys) -> None:
    """Give the global generators of torch, on every device, of NumPy and of Python new keys."""
    of_devices = _seed(keys)
    if _has_accelerator():  # without one, torch would take 3 ms to register the seed for later devices
        torch.manual_seed(of_devices)
    torch.set_rng_state(_cpu_state(keys))
    np.random.set_state(("MT19937", keys(624), 624, 0, 0.0))
    random.seed(keys(8).tobytes())


@functools.cache
def _has_accelerator() -> bool:  # which torch looks up in the driver each time
    return torch.accelerator.is_available()


def _seed(keys: Keys) -> int:
    return int(keys(2).view(np.uint64)[0])


def _cpu_state(keys: Keys) -> torch.Tensor:
    """A state of torch's mt19937, in the layout of ``torch.get_rng_state``.

    That is the initial seed (8 bytes), the words left (4), whether it is seeded (4), the next word (8), 624 words of 8
    bytes each with a value of 32 bits, and normal values kept for the next call (none). One word left makes the next
    draw compute 624 new ones.
    """
    state = np.zeros(torch.get_rng_state().numel(), dtype=np.uint8)
    state[:8] = keys(2).view(np.uint8)
    state[8:16].view(np.int32)[:] = 1, 1
    state[24 : 24 + 8 * 624].view(np.uint64)[:] = keys(624)
    return torch.from_numpy(state)


def _rekey(generators: Iterable[Any], keys: Keys) -> None:
    for generator in generators:
        if isinstance(generator, torch.Generator):
            if generator.device.type == "cpu":
                generator.set_state(_cpu_state(keys))
            else:
                generator.manual_seed(_seed(keys))
        elif isinstance(generator, random.Random):
            generator.seed(keys(8).tobytes())
        elif isinstance(generator, np.random.RandomState):
            generator.seed(keys(624))
        else:
            bits: Any = generator.bit_generator
            fresh = type(bits)(np.random.SeedSequence(keys(8).tolist(), pool_size=8))
            bits.__setstate__((fresh.state, fresh.seed_seq))  # spawn() makes further generators from the latter
