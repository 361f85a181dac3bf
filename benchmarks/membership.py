"""Whether the public seed of a run tells if an example was in its training set.

Removing one example shifts the dropout masks and augmentations of all that come after it in a physical batch. An
attacker who can reproduce them knows the sum of each step for both answers, and compares them with what was released.
The attacker here knows all examples, the weights, which examples are drawn (all of them), and the seed of
``seed_everything``; only the noise, and whatever the private step keeps secret, is unknown. The learning rate is zero,
so that both sums have to be computed only once.

The control shows what a step without keys of its own would give the attacker: its random numbers follow from the seed.

    python benchmarks/membership.py --runs 200
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dp_lightning.privacy import PrivacyPlan, PrivateStep
from dp_lightning.privacy.randomness import TrainingRandomness

SEED = 42


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Examples with noise from torch's global generator; ``start`` leaves out those before it."""

    def __init__(self, size: int, start: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 8, generator=generator)[start:]
        self.y = torch.randint(3, (size,), generator=generator)[start:]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.5 * torch.randn(8), self.y[index]


@dataclass(frozen=True)
class Setting:
    """The attacked runs; noise_multiplier / sqrt(num_steps) decides how much the guarantee lets through."""

    size: int = 400
    num_steps: int = 16
    noise_multiplier: float = 40.0
    examples: str = "together"

    @property
    def allowed(self) -> float:
        """The highest probability with which an attack on the mechanism itself can be right."""
        mu = math.sqrt(self.num_steps) / self.noise_multiplier
        return 0.5 * (1 + math.erf(mu / 2 / math.sqrt(2)))

    def released(self, *, target_in: bool, public: bool, noise_multiplier: float | None = None) -> Tensor:
        """The sums of a run (T, P), after ``seed_everything``.

        Args:
            target_in: whether the first example is included.
            public: whether the step uses no keys of its own.
            noise_multiplier: replaces the setting's.
        """
        pl.seed_everything(SEED, verbose=False)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))
        dataset = Augmented(self.size, 0 if target_in else 1)
        plan = PrivacyPlan(
            num_train=len(dataset),
            expected_batch_size=len(dataset),
            num_steps=self.num_steps,
            noise_multiplier=self.noise_multiplier if noise_multiplier is None else noise_multiplier,
            delta=1e-5,
        )

        def loss(batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        sums = []
        with _no_keys() if public else mock.MagicMock():
            private = PrivateStep(model, loss, dataset, plan=plan, examples=self.examples, max_physical_batch_size=100)
            for _ in range(self.num_steps):
                for batch in private.batches():
                    private.accumulate(batch)
                private.release()
                sums.append(len(dataset) * torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        return torch.stack(sums)


@contextmanager
def _no_keys() -> Iterator[None]:
    """Make the random numbers of the step follow from ``seed_everything``."""

    def nothing(*args: Any) -> None:
        pass

    with (
        mock.patch("dp_lightning.privacy.step.before_reading", nothing),
        mock.patch.object(TrainingRandomness, "before_step", nothing),
    ):
        yield


def right(runs: int, setting: Setting, *, public: bool) -> int:
    """The number of runs in which the attacker is right about whether the first example was included.

    Args:
        runs: a fair coin decides for each.
        setting: the settings of the runs.
        public: the control, in which the step's random numbers follow from the seed.
    """
    with_it, without = (setting.released(target_in=there, public=True, noise_multiplier=0.0) for there in (True, False))
    direction, middle = with_it - without, (with_it + without) / 2
    count, coins = 0, random.SystemRandom()
    for _ in range(runs):
        there = coins.random() < 0.5
        seen = setting.released(target_in=there, public=public)
        count += bool(((seen - middle) * direction).sum() > 0) == there
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Attack and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--examples", choices=("together", "one_by_one"), default="together")
    parser.add_argument("--control", type=int, default=20, help="runs whose random numbers follow from the seed")
    options = parser.parse_args(arguments)
    setting = Setting(examples=options.examples)
    print(f"the guarantee lets through: {setting.allowed:.1%}", flush=True)
    print(
        f"public random numbers: right {right(options.control, setting, public=True)} of {options.control}", flush=True
    )
    print(f"secret random numbers: right {right(options.runs, setting, public=False)} of {options.runs}", flush=True)


if __name__ == "__main__":
    main()
