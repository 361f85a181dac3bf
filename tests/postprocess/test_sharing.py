"""Parameters are dealt out to ranks by their cost, and only where it pays."""

import pytest
import torch

from dp_lightning.postprocess import Momentum, Orthogonalize
from dp_lightning.postprocess.sharing import _owners
from dp_lightning.ranks import Ranks


def test_the_load_is_spread_by_cost():
    chain = [torch.zeros(shape) for shape in [(64, 64)] * 5 + [(128, 128)]]
    owners = _owners(Orthogonalize(), dict(zip("abcdef", chain, strict=True)), Ranks(0, 2, operations_per_byte=1e-9))
    # The large matrix costs eight times a small one.
    assert owners["f"] == 0
    assert all(owners[name] == 1 for name in "abcde")


@pytest.mark.parametrize(
    ("per_byte", "per_call", "shared"),
    [
        (1e-9, 0.0, {"small", "large"}),
        # Five Newton-Schulz steps of a square matrix of side n take 7.5 n operations per byte; two ranks spare half.
        (3.8 * 64, 0.0, {"large"}),
        (3.8 * 256, 0.0, set()),
        (1e-9, 1e12, set()),
    ],
)
def test_what_does_not_pay_is_computed_everywhere(per_byte, per_call, shared):
    given = {"small": (64, 64), "large": (256, 256), "twin": (256, 256), "bias": (256,)}
    owners = _owners(
        Orthogonalize(), {name: torch.zeros(shape) for name, shape in given.items()}, Ranks(1, 2, per_byte, per_call)
    )
    assert set(owners) - {"twin"} == shared
    assert _owners(Orthogonalize(), {"large": torch.zeros(256, 256)}, Ranks(0, 1)) == {}
    # One large matrix alone: nobody is spared anything.
    assert _owners(Orthogonalize(), {"large": torch.zeros(256, 256)}, Ranks(0, 2, 1e-9)) == {}
    assert _owners(Momentum(0.9), {"large": torch.zeros(256, 256)}, Ranks(0, 2, 1e-9)) == {}
