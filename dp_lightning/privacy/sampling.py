"""Poisson sampling: in each logical step every example takes part with probability q, independently of the others.

One draw is made per logical step and then cut into physical batches; the draws of several smaller batches added
together would be another mechanism. Draws are numbered: draw t is a function of a secret key and of t alone, so that a
loader may prepare draws ahead, and what counts as used is only what the ledger has recorded.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dp_lightning.errors import ConfigurationError


@dataclass(frozen=True)
class PhysicalBatch:
    """A piece of a logical batch that goes through the model at once.

    Attributes:
        indices: positions in the training set. A logical batch without examples is one placeholder example.
        first: whether the logical batch begins here.
        last: whether the logical batch ends here.
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
    """

    def __init__(self, *, num_train: int, sample_rate: float, seed: int | None = None) -> None:
        self.num_train, self.sample_rate, self.seed = num_train, sample_rate, seed
        self._key = _key(seed)

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
        if state["seed"] != self.seed:
            raise ConfigurationError(
                f"privacy.sampling_seed is {self.seed}, the checkpoint was made with {state['seed']}. Set it to the "
                "checkpoint's value."
            )


def _key(seed: int | None) -> npt.NDArray[np.uint64]:
    if seed is not None:
        return np.random.SeedSequence(seed).generate_state(2, np.uint64).astype(np.uint64)
    words = [secrets.randbits(64), secrets.randbits(64)]
    return np.array(words, dtype=np.uint64)


def cut(indices: npt.NDArray[np.int64], max_physical_batch_size: int) -> Iterator[PhysicalBatch]:
    """One logical batch as physical batches of at most ``max_physical_batch_size``; an empty one as a placeholder."""
    if len(indices) == 0:
        yield PhysicalBatch([0], first=True, last=True, placeholder=True)
        return
    for start in range(0, len(indices), max_physical_batch_size):
        end = start + max_physical_batch_size
        yield PhysicalBatch(indices[start:end].tolist(), first=start == 0, last=end >= len(indices))


def epoch_end(step: int, *, num_train: int, expected_batch_size: int, num_steps: int) -> int:
    """The logical step at which the epoch that contains ``step`` ends.

    Epoch e ends after floor((e + 1) * N / B) steps, so that E epochs have floor(E * N / B) steps; the last epoch ends
    with the plan.
    """
    epoch = step * expected_batch_size // num_train
    while (epoch + 1) * num_train // expected_batch_size <= step:
        epoch += 1
    return min((epoch + 1) * num_train // expected_batch_size, num_steps)
