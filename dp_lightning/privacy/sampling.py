"""Poisson sampling: in each logical step every example takes part with probability q, independently of the others.

One draw is made per logical step, the same on every rank, and then dealt out to the ranks and cut into physical
batches; the draws of several smaller batches added together would be another mechanism. Draws are numbered: draw t is a
function of a secret key and of t alone, so that a loader may prepare draws ahead, and what counts as used is only what
the ledger has recorded.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dp_lightning.privacy.seeds import require_same_seed

Key = tuple[int, int]
"""128 bits from which all draws of a run follow."""


@dataclass(frozen=True)
class PhysicalBatch:
    """A piece of a logical batch that goes through the model at once.

    Attributes:
        indices: positions in the training set. A piece without examples is one placeholder example.
        first: whether the rank's share of the logical batch begins here.
        last: whether it ends here.
        placeholder: whether the example only stands in, so that it must contribute zero.
    """

    indices: list[int]
    first: bool
    last: bool
    placeholder: bool = False


class PoissonSampler:
    """Draws logical batches from a training set.

    Formal guarantee: over the secret key, the inclusions are independent with probability ``sample_rate`` up to the
    2^-53 resolution of the uniform numbers, across examples and across draws. The generator (Philox 4x64) passes
    statistical tests but is not a cryptographic one.

    Args:
        num_train: number of examples N.
        sample_rate: q in (0, 1].
        seed: None takes a secret key from the operating system. A number makes the draws reproducible, and the run
            not fit for release.
        key: as ``sampling_key(seed)`` returned it on one rank, so that all ranks have the same; None makes one.
    """

    def __init__(self, *, num_train: int, sample_rate: float, seed: int | None = None, key: Key | None = None) -> None:
        self.num_train, self.sample_rate, self.seed = num_train, sample_rate, seed
        self._key = np.array(sampling_key(seed) if key is None else key, dtype=np.uint64)

    def draw(self, step: int) -> npt.NDArray[np.int64]:
        """Sorted positions of the examples of logical step ``step``."""
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, step]))
        return np.flatnonzero(generator.random(self.num_train) < self.sample_rate)

    def state_dict(self) -> dict[str, Any]:
        """Whether the draws are reproducible. A secret key is never written."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint: with a seed the numbered draws go on, without one a fresh key is used.

        A fresh key means that steps which ran after the checkpoint, and were lost, are not drawn again.

        Raises:
            ConfigurationError: when the checkpoint's seed is another one.
        """
        require_same_seed("sampling_seed", self.seed, state["seed"])


def sampling_key(seed: int | None) -> Key:
    """A secret key from the operating system, or the one of ``seed``."""
    if seed is None:
        return secrets.randbits(64), secrets.randbits(64)
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return first, second


def cut(
    indices: npt.NDArray[np.int64], max_physical_batch_size: int, *, rank: int = 0, num_ranks: int = 1
) -> Iterator[PhysicalBatch]:
    """A rank's share of one logical batch, as physical batches of at most ``max_physical_batch_size``.

    Every rank gets the same number of physical batches, about equally large, so that ranks can act together in each of
    them. A piece without examples is a placeholder.
    """
    largest_share = -(-len(indices) // num_ranks)
    count = max(-(-largest_share // max_physical_batch_size), 1)
    for number, piece in enumerate(np.array_split(indices[rank::num_ranks], count)):
        yield PhysicalBatch(
            piece.tolist() or [0],
            first=number == 0,
            last=number == count - 1,
            placeholder=len(piece) == 0,
        )


def epoch_end(step: int, *, num_train: int, expected_batch_size: int, num_steps: int) -> int:
    """The logical step at which the epoch that contains ``step`` ends.

    Epoch e ends after floor((e + 1) * N / B) steps, so that E epochs have floor(E * N / B) steps; the last epoch ends
    with the plan.
    """
    epoch = step * expected_batch_size // num_train
    while (epoch + 1) * num_train // expected_batch_size <= step:
        epoch += 1
    return min((epoch + 1) * num_train // expected_batch_size, num_steps)
