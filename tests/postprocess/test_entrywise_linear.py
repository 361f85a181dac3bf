"""A transform that derives from EntrywiseLinear cannot state another noise than it makes."""

import random

import numpy as np
import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Chain, Entry, EntrywiseLinear, Memory

SHAPES = {"weight": torch.Size((4, 6))}
NOISE = 0.5


class Decaying(EntrywiseLinear):
    """1/t of the sum of the gradients so far, which uses all that an entry can do."""

    has_memory = True

    def step(self, value, memory, *, noise, shape):
        steps = memory.numbers.get("steps", 0) + 1
        total = memory.entries.get("total", value.zeros()) + 2.0 * value - value * 1
        return total / steps, Memory({"total": total}, {"steps": steps})


def of_step(function):
    """A transform whose step is ``function`` of an entry and its memory."""

    class Bad(EntrywiseLinear):
        def step(self, value, memory, *, noise, shape):
            return function(value, memory)

    return Bad()


BAD = {
    "mixes entries by a method": lambda value, memory: (value.flip(0), Memory()),
    "mixes entries by indexing": lambda value, memory: (value[::-1], Memory()),
    "mixes entries by a product with a matrix": lambda value, memory: (torch.ones(4, 4) @ value, Memory()),
    "mixes entries by numpy": lambda value, memory: (np.sort(value), Memory()),
    "another weight for each entry": lambda value, memory: (torch.rand(4, 6) * value, Memory()),
    "affine": lambda value, memory: (value + 1.0, Memory()),
    "a constant": lambda value, memory: (torch.zeros(4, 6), Memory()),
    "sign": lambda value, memory: (torch.sign(value), Memory()),
    "power": lambda value, memory: (value**2, Memory()),
    "truth": lambda value, memory: (value if value else value.zeros(), Memory()),
    "its own norm": lambda value, memory: (value / value.norm(), Memory()),
    "in the memory": lambda value, memory: (value, Memory({"past": torch.ones(4, 6)})),
    "a number that is an entry": lambda value, memory: (value, Memory({}, {"past": value})),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("noise", [NOISE, None])
def test_what_is_not_entrywise_and_linear_is_refused(kind, noise):
    chain = Chain([of_step(BAD[kind])])
    with pytest.raises(ConfigurationError, match=r"Bad derives from EntrywiseLinear.*Derive from Transform"):
        chain({"weight": torch.randn(4, 6)}, noise=noise)
    with pytest.raises(ConfigurationError, match="Bad derives from EntrywiseLinear"):  # before the first step, too
        chain.check(SHAPES, noise=NOISE)


def test_weights_that_are_drawn_are_refused():
    class Draws(EntrywiseLinear):
        def step(self, value, memory, *, noise, shape):
            return value * random.random(), Memory()

    with pytest.raises(ConfigurationError, match="Draws gives another noise level when it starts again"):
        Chain([Draws()]).check(SHAPES, noise=NOISE)


@pytest.mark.parametrize("name", ["update", "apply", "advance"])
def test_a_subclass_may_not_go_around_its_step(name):
    with pytest.raises(ConfigurationError, match=f"Doubles derives from EntrywiseLinear and has its own {name}"):
        type("Doubles", (EntrywiseLinear,), {name: lambda self, *args: args, "step": Decaying.step})


def test_the_noise_is_that_of_the_output():
    """Of 4,000 chains that differ by their noise alone."""
    steps, shape = 5, (40, 100)
    chain = Chain([Decaying()])
    chain.check({"weight": torch.Size(shape)}, noise=NOISE)
    levels = [NOISE * (1 + step) for step in range(steps)]
    for level in levels:
        output = chain({"weight": level * torch.randn(shape)}, noise=level)["weight"]
    expected = sum((level / steps) ** 2 for level in levels) ** 0.5
    assert chain.noise["weight"] == pytest.approx(expected, rel=1e-12)
    assert output.std().item() == pytest.approx(expected, rel=0.05)  # four standard errors of 4,000 draws


def test_a_public_number_is_kept_exactly():
    third = 1 / 3
    _, slots = Decaying().advance(torch.ones(2), {}, noise=None, shape=torch.Size((2,)))
    assert {name: slot.dtype for name, slot in slots.items() if slot.ndim == 0} == {"number/steps": torch.float64}

    class Thirds(EntrywiseLinear):
        def step(self, value, memory, *, noise, shape):
            assert memory.numbers.get("third", third) == third
            return value, Memory({}, {"third": third})

    transform, slots = Thirds(), {}
    for _ in range(2):
        _, slots = transform.advance(torch.ones(2), slots, noise=None, shape=torch.Size((2,)))


def test_an_entry_says_nothing_of_its_value():
    entry = Entry(torch.tensor(1.5))
    with pytest.raises(Exception, match="does more with an entry"):
        str(float(entry))
    assert "1.5" not in repr(entry)
