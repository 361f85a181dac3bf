"""A transform that derives from EntrywiseLinear cannot state another noise than it makes."""

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Chain, EntrywiseLinear, Memory

SHAPES = {"weight": torch.Size((4, 6))}
NOISE = 0.5


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
def test_what_is_not_entrywise_and_linear_is_refused(kind):
    chain = Chain([of_step(BAD[kind])])
    with pytest.raises(ConfigurationError, match=r"Bad derives from EntrywiseLinear.*Derive from Transform"):
        chain({"weight": torch.randn(4, 6)})
    with pytest.raises(ConfigurationError, match="Bad derives from EntrywiseLinear"):  # before the first step, too
        chain.check(SHAPES, noise=NOISE)


def test_a_public_number_is_kept_exactly():
    third = 1 / 3

    class Thirds(EntrywiseLinear):
        def step(self, value, memory, *, noise, shape):
            assert memory.numbers.get("third", third) == third
            return value, Memory({}, {"third": third})

    transform, slots = Thirds(), {}
    for _ in range(2):
        _, slots = transform.advance(torch.ones(2), slots, noise=None, shape=torch.Size((2,)))
