"""Poisson sampling: in each logical step every example takes part with probability q, independently of the others.

Where noise is correlated over b steps (``bands``), this is so for the examples of one of b groups, in turn.

One draw is made per logical step, the same on every rank, and then dealt out to the ranks and cut into physical
batches; the draws of several smaller batches added together would be another mechanism. Draws are numbered: draw t is a
function of a secret key and of t alone, so that a loader may prepare draws ahead, and what counts as used is only what
the ledger has recorded.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Key = tuple[int, int]
"""128 bits from which all draws of a run follow."""


@dataclass(frozen=True)
class PhysicalBatch:
    """A piece of a logical batch that goes through the model at once.

    Attributes:
        step: number of the logical step.
        piece: number of the piece in the rank's share of the logical batch.
        indices: positions in the training set; none where the rank has no example, which takes part all the same.
        pieces: how many the share has.
    """

    step: int
    piece: int
    indices: tuple[int, ...]
    pieces: int

    @property
    def last(self) -> bool:
        """Whether the rank's share ends here."""
        return self.piece == self.pieces - 1


class PoissonSampler:
    """Draws logical batches from a training set.

    Formal guarantee: over the secret key, the group of each example is uniform and independent of the others, and the
    inclusions of the examples of a step's group are independent with probability ``sample_rate``, up to the 2^-53
    resolution of the uniform numbers, across examples and across draws. The generator (Philox 4x64) passes statistical
    tests but is not a cryptographic one.

    Args:
        num_train: number of examples N.
        sample_rate: q in (0, 1], of each example of the group that a step draws from.
        bands: b, the number of groups; each example is in one of them, and step t draws from group t mod b.
        key: as ``sampling_key`` returned it on one rank, so that all ranks have the same; None makes a secret one. A
            key is never written: a run that resumes takes a new one, so that steps which ran after the checkpoint, and
            were lost, are not drawn again.
    """

    def __init__(self, *, num_train: int, sample_rate: float, bands: int = 1, key: Key | None = None) -> None:
        self.num_train, self.sample_rate, self.bands = num_train, sample_rate, bands
        self._key = np.array(sampling_key() if key is None else key, dtype=np.uint64)

    def draw(self, step: int) -> npt.NDArray[np.int64]:
        """Sorted positions of the examples of logical step ``step``."""
        drawn = self._uniform(0, step) < self.sample_rate
        return np.flatnonzero(drawn if self.bands == 1 else drawn & (self._groups == step % self.bands))

    @cached_property
    def _groups(self) -> npt.NDArray[np.int64]:
        """The group of each example, (N,)."""
        return (self._uniform(1, 0) * self.bands).astype(np.int64)

    def _uniform(self, use: int, number: int) -> npt.NDArray[np.float64]:
        """Numbers in [0, 1), (N,), that are other ones for each use and number."""
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, use, number]))
        return generator.random(self.num_train)


def sampling_key(seed: int | None = None) -> Key:
    """A secret key from the operating system, or the one of ``seed``."""
    if seed is None:
        return secrets.randbits(64), secrets.randbits(64)
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return first, second


def cut(
    indices: npt.NDArray[np.int64],
    max_physical_batch_size: int,
    *,
    step: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[PhysicalBatch]:
    """A rank's share of one logical batch, as physical batches of at most ``max_physical_batch_size``.

    Every rank gets the same number of physical batches, about equally large, so that ranks can act together in each of
    them.
    """
    largest_share = -(-len(indices) // num_ranks)
    count = max(-(-largest_share // max_physical_batch_size), 1)
    for piece, mine in enumerate(np.array_split(indices[rank::num_ranks], count)):
        yield PhysicalBatch(step, piece, tuple(mine.tolist()), pieces=count)
