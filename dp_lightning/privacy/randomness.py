"""Keys for everything random in training: dropout, augmentation, workers that load data, generators of the model.

Draws that an attacker can repeat do not protect: with a known seed, leaving out one example moves the masks of all
others. So every generator takes its key from the operating system, unless a run is explicitly reproducible; then its
keys are derived from the run's seed, and the run is not for release.

torch's generator on a CPU keeps 32 bits of a seed, which can be tried one by one, so it is given a whole state of
19,937 bits instead. Generators of other devices (Philox) take a seed of 64 bits.
"""

import functools
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.gradients.refusals import HOST_DRAW
from dp_lightning.privacy.isolation.contents import generator_state
from dp_lightning.privacy.isolation.reachable import Ignored, walk
from dp_lightning.privacy.sampling import PhysicalBatch
from dp_lightning.torch_internals import global_numpy_generator

Keys: TypeAlias = Callable[[int], NDArray[np.uint32]]
"""Returns that many words of 32 bits, new ones with every call."""

_SEEDING = [(module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
# Where generators of the host, uuid and secrets take their numbers from.
_ENTROPY: list[tuple[Any, str]] = [(os, "urandom"), (random, "_urandom"), (random.Random, "__init__")]
_ENTROPY += [(np.random.bit_generator, "randbits")]
_SEEDED = (
    "training_step seeds torch's generator: what it draws would follow from an example's place in its physical batch. "
    "Leave the seed out, or set privacy.examples: one_by_one."
)
_MADE = f"training_step makes a random generator, or asks the system for random numbers. {HOST_DRAW}"
_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


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
    """The global generators of torch, NumPy and Python in a private run.

    Args:
        seed: None for secret keys. A number makes every physical batch, its reading and its step, a function of the
            seed and of its place, whoever reads it and however far ahead; the run is not for release.
        rank: of this process.
    """

    def __init__(self, seed: int | None = None, *, rank: int = 0):
        self.seed, self.rank = seed, rank
        self._reached: list[tuple[str, object]] = []

    def start(self) -> None:
        """Give all global generators of this process new keys; a resumed run does so too."""
        rekey_global_generators(keys_from(self.seed, self.rank))

    def rekey(self, roots: Mapping[str, object], ignored: Ignored = lambda owner, name: False) -> None:
        """Give every generator that can be reached a new key; arguments and errors as of ``rekey_generators``.

        From here on they get others before each loss, as the global ones do.
        """
        self._reached = rekey_generators(roots, keys_from(self.seed, self.rank, 0), ignored)

    @property
    def generators(self) -> list[object]:
        """Those that were reached."""
        return [generator for _, generator in self._reached]

    def before_reading(self, place: PhysicalBatch) -> None:
        """Before the examples of a physical batch are read.

        Hooks, data sets and collation may seed the global generators, with seeds that anyone can repeat: they get new
        keys each time.
        """
        self._rekey(place, 1)

    def before_step(self, place: PhysicalBatch, example: int = 0) -> None:
        """Before their losses are computed, or that of one of them."""
        keys = self._rekey(place, 2 + example)
        for path, generator in self._reached:
            _rekey(path, generator, keys)

    def _rekey(self, place: PhysicalBatch, use: int) -> Keys:
        keys = keys_from(self.seed, self.rank, place.step, place.piece, use)
        rekey_global_generators(keys)
        return keys


@contextmanager
def only_given_keys() -> Iterator[None]:
    """Refuse to seed torch's global generator, and to make generators of the host or ask the system for numbers.

    Numbers of a seed would follow from an example's place in its batch; those of the host are one for all examples.

    Raises:
        ModelError: where one of it was done.
    """
    import torch.fx.experimental.symbolic_shapes  # torch does so in a loss, and sympy makes a generator

    this = threading.get_ident()

    def refused(function: Callable[..., Any], message: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != this:
                return function(*args, **kwargs)
            raise ModelError(message)

        return refuse

    replaced = [(owner, name, _SEEDED) for owner, name in _SEEDING] + [(owner, name, _MADE) for owner, name in _ENTROPY]
    before, initial = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced], torch.initial_seed()
    for (owner, name, function), (_, _, message) in zip(before, replaced, strict=True):
        setattr(owner, name, refused(function, message))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
    if torch.initial_seed() != initial:
        raise ModelError(_SEEDED)


def rekey_global_generators(keys: Keys) -> None:
    """Give the global generators of torch, on every device, of NumPy and of Python new keys."""
    of_devices = _seed(keys)
    if _has_accelerator():  # else torch would note the whole stack for each kind that it knows, 3 ms
        torch.manual_seed(of_devices)
    torch.set_rng_state(_cpu_state(keys))
    _rekey("numpy.random", global_numpy_generator, keys)
    random.seed(keys(8).tobytes())


@functools.cache
def _has_accelerator() -> bool:
    """Whether this machine has one; torch looks for the driver's library each time that it is asked."""
    return torch.accelerator.is_available()


@dataclass(frozen=True)
class WorkerSeeding:
    """``worker_init_fn`` of a DataLoader: gives each worker keys of its own.

    The keys are changed before and after ``then``, since such functions often call ``np.random.seed(worker_id)``,
    which anyone can repeat.

    Attributes:
        seed: None for keys from the operating system. With a seed, they are derived from it, the rank, the worker and
            the loader's own seed, which is another in every epoch.
        rank: of the process that the workers belong to.
        then: the user's own ``worker_init_fn``.
    """

    seed: int | None
    rank: int
    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        keys = keys_from(self.seed, self.rank, worker_id, info.seed if info is not None else 0)
        rekey_global_generators(keys)
        if self.then is not None:
            self.then(worker_id)
            rekey_global_generators(keys)


def rekey_generators(
    roots: Mapping[str, object], keys: Keys, ignored: Ignored = lambda owner, name: False
) -> list[tuple[str, object]]:
    """Give every generator that can be reached from ``roots`` a new key.

    Args:
        roots: objects by the name that their paths begin with.
        keys: from :func:`keys_from`.
        ignored: attributes that are not followed, as in :class:`~dp_lightning.privacy.isolation.state.StateSnapshot`.

    Returns:
        The generators, with their paths.

    Raises:
        ConfigurationError: naming a generator that cannot be given a key.
    """
    found = [(path, value) for path, value, _ in walk(roots, ignored) if _needs_key(value)]
    for path, generator in found:
        _rekey(path, generator, keys)
    return found


class NoHostDraws:
    """Tells whether NumPy's or Python's global generator was drawn from between two moments.

    Under ``torch.func.vmap`` such a draw is one number for all examples of a physical batch.
    """

    def note(self) -> None:
        """Remember where the generators stand."""
        self._python, self._numpy = random.getstate(), generator_state(global_numpy_generator)

    def drawn(self) -> list[str]:
        """The generators that have moved since :meth:`note`: ``numpy.random``, ``random``."""
        names = [] if generator_state(global_numpy_generator) == self._numpy else ["numpy.random"]
        return names if random.getstate() == self._python else [*names, "random"]


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


def _needs_key(value: object) -> bool:
    kind = type(value)
    if issubclass(kind, random.SystemRandom):
        return False
    numpy = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence)
    return issubclass(kind, (torch.Generator, random.Random, *numpy))


def _rekey(path: str, generator: Any, keys: Keys) -> None:
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cpu":
            generator.set_state(_cpu_state(keys))
        else:
            generator.manual_seed(_seed(keys))
    elif isinstance(generator, random.Random):
        random.Random.seed(generator, keys(8).tobytes())
    elif isinstance(generator, np.random.RandomState):
        name = str(generator.get_state(legacy=False)["bit_generator"])
        if name == "MT19937":  # that of the global generator: 624 words of which none is left, as in torch's
            generator.set_state((name, keys(624), 624, 0, 0.0))
        else:
            generator.set_state({**_bit_generator(path, name, keys).state, "has_gauss": 0, "gauss": 0.0})
    elif isinstance(generator, np.random.SeedSequence):
        np.random.SeedSequence.__init__(generator, keys(8).tolist())
    else:
        bits: Any = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        fresh = _bit_generator(path, type(bits).__name__, keys)
        # With its seed sequence, from which spawn() makes further generators.
        bits.__setstate__((fresh.state, fresh.seed_seq))


def _bit_generator(path: str, name: str, keys: Keys) -> Any:
    if name not in _BIT_GENERATORS:
        raise ConfigurationError(
            f"{path} draws from {name}, which cannot be given a secret key. Use np.random.default_rng() there."
        )
    return _BIT_GENERATORS[name](np.random.SeedSequence(keys(8).tolist(), pool_size=8))
