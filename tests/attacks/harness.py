"""Trains an attacker's module on a data set and on the same without one example, and compares what is released.

The transcript of the first run is replayed on the second data set: before each step its weights are those of the first
run. Nothing is random but what the attack itself draws: there is no noise, and every example, or the same ones, are in
each draw. What is left is the change of a released sum, which may be at most the declared sensitivity. A physical
batch has at most 4 examples, so that leaving one out moves all that come after it, and changes how many batches there
are: 9 examples make three, 8 make two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from dp_lightning.errors import DpLightningError
from dp_lightning.privacy import PrivacyPlan, PrivateStep
from dp_lightning.privacy.sampling import PoissonSampler

N, STEPS, OUTLIER, PHYSICAL = 9, 3, 4, 4
#: First, an outlier in the middle, last.
REMOVED = (0, OUTLIER, N - 1)
#: Rounding of sums of nine float32 vectors of length one.
ALLOWED = 1 + 1e-5


class Attack(nn.Module):
    """An ordinary module with something in it that may carry one example into the loss of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch; x: (n, 5), y: (n)."""
        return F.cross_entropy(self.net(x), y)

    @staticmethod
    def dataset(x: Tensor, y: Tensor) -> Dataset[Any]:
        """The training set of these examples."""
        return TensorDataset(x, y)

    def collate_fn(self, examples: list[Any]) -> Any:
        """Of the training set's loader."""
        return default_collate(examples)

    def between(self, step: int) -> None:
        """Called before each logical step, as a hook of the module would be."""


def examples(n: int = N) -> tuple[Tensor, Tensor]:
    """Inputs (n, 5) and labels (n), with one outlier."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 5, generator=generator), torch.arange(n) % 3
    x[OUTLIER] *= 30
    y[OUTLIER] = 0
    return x, y


@dataclass
class Run:
    """What one run has released: the sum of each step, and the weights that it was taken at."""

    sums: list[Tensor]
    weights: list[list[Tensor]]


def run(
    kind: Callable[[], Attack],
    keep: list[int],
    *,
    mode: str = "together",
    transcript: Run | None = None,
    draws: list[list[int]] | None = None,
    steps: int = STEPS,
) -> Run:
    """Train on the examples in ``keep``.

    Args:
        kind: makes the module.
        keep: positions among the examples.
        mode: ``together`` or ``one_by_one``.
        transcript: a run whose weights each step starts from.
        draws: positions among the examples that each step draws; all of them without.
        steps: how many logical steps.
    """
    x, y = examples(max(N, max(keep) + 1))
    torch.manual_seed(0)
    attack = kind()
    batch_size = len(keep) if draws is None else 5
    plan = PrivacyPlan(
        num_train=len(keep), expected_batch_size=batch_size, num_steps=steps, noise_multiplier=0.0, delta=1e-3
    )
    private = PrivateStep(
        attack,
        lambda batch: attack.training_step(*batch),
        attack.dataset(x[keep], y[keep]),
        plan=plan,
        collate_fn=attack.collate_fn,
        examples=mode,
        max_physical_batch_size=PHYSICAL,
    )
    optimizer = torch.optim.SGD(private.parameters.values(), lr=0.1)
    done = Run([], [])
    with _drawn(keep, draws):
        for step in range(steps):
            attack.between(step)
            if transcript is not None:
                with torch.no_grad():
                    for parameter, value in zip(private.parameters.values(), transcript.weights[step], strict=True):
                        parameter.copy_(value)
                private._weights.hold()  # the transcript stands for the releases
            done.weights.append([parameter.detach().clone() for parameter in private.parameters.values()])
            for batch in private.batches():
                private.accumulate(batch)
            private.release()
            done.sums.append(batch_size * torch.cat([p.grad.double().flatten() for p in private.parameters.values()]))
            optimizer.step()
    return done


@contextmanager
def _drawn(keep: list[int], draws: list[list[int]] | None) -> Iterator[None]:
    """The sampler takes these examples, those of them that there are."""
    if draws is None:
        yield
        return
    places = {index: place for place, index in enumerate(keep)}

    def draw(self: PoissonSampler, step: int) -> Any:
        return np.array([places[index] for index in draws[step] if index in places], dtype=np.int64)

    with mock.patch.object(PoissonSampler, "draw", draw):
        yield


def ratio(kind: Callable[[], Attack], mode: str = "together", *, drawn: bool = False) -> float:
    """The largest change of a released sum when one example is left out, over the sensitivity 1.

    Every example is in each draw; with ``drawn`` also two in three, each draw the same with the outlier and without.
    """
    everyone = list(range(N))
    # One by one, each example is a physical batch of its own, so that two steps have enough of them.
    removed, steps = (REMOVED, STEPS) if mode == "together" else (REMOVED[:2], 2)
    whole = run(kind, everyone, mode=mode, steps=steps)
    found = 0.0
    for index in removed:
        rest = [other for other in everyone if other != index]
        found = max(found, _change(whole, run(kind, rest, mode=mode, transcript=whole, steps=steps)))
    if not drawn:
        return found
    many = list(range(14))
    draws = [[0, 1, 3, 4, 5, 7, 8, 10, 12], [1, 2, 4, 6, 9], [0, 2, 3, 4, 5, 6, 8, 9, 11, 13]]
    whole = run(kind, many, mode=mode, draws=draws)
    rest = [other for other in many if other != OUTLIER]
    return max(found, _change(whole, run(kind, rest, mode=mode, transcript=whole, draws=draws)))


def _change(one: Run, other: Run) -> float:
    return max(float((a - b).norm()) for a, b in zip(one.sums, other.sums, strict=True))


# What is expected

HARMLESS = ""


@dataclass(frozen=True)
class Case:
    """An attack, and what has to happen.

    Attributes:
        name: of the attack.
        kind: makes its module.
        mode: ``together`` or ``one_by_one``.
        expected: HARMLESS, or words of the message that refuses it; with ``or harmless`` behind them, either.
        drawn: also with a sampling probability below one.
    """

    name: str
    kind: Callable[[], Attack]
    mode: str
    expected: str
    drawn: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}"


class Cases(list[Case]):
    """The attacks of one table."""

    def __init__(self, *, drawn: bool = False) -> None:
        super().__init__()
        self._drawn = drawn

    def expect(self, together: str | None, one_by_one: str | None) -> Callable[[Any], Any]:
        """Add a module to the table; None leaves a way out."""

        def add(kind: Any) -> Any:
            for mode, expected in (("together", together), ("one_by_one", one_by_one)):
                if expected is not None:
                    self.append(Case(kind.__name__, kind, mode, expected, self._drawn))
            return kind

        return add

    def parameters(self, holes: set[str]) -> list[Any]:
        """For ``pytest.mark.parametrize``; what still gets through is expected to fail."""
        unknown = holes - {str(case) for case in self}
        assert not unknown, f"there is no attack {unknown}"
        mark = pytest.mark.xfail(strict=True, reason="it gets through")
        return [pytest.param(case, id=str(case), marks=[mark] if str(case) in holes else []) for case in self]


def outcome(case: Case) -> tuple[str, Any]:
    """``("refused", message)`` or ``("ratio", number)``; any other error comes through."""
    try:
        return "ratio", ratio(case.kind, case.mode, drawn=case.drawn)
    except DpLightningError as error:
        return "refused", str(error)


def check(case: Case) -> None:
    """An attack is harmless, or refused by a message that names the cause."""
    words, either, _ = case.expected.partition(" or harmless")
    kind, value = outcome(case)
    if kind == "ratio":
        assert either or words == HARMLESS, f"not refused; a released sum changes by {value:.4f} of the sensitivity"
        assert value <= ALLOWED, f"a released sum changes by {value:.4f} of the sensitivity"
    else:
        assert words, f"refused: {value}"
        assert words in value, value
