"""Parameters dealt out to ranks: the result of one rank, the same bits on all, and only where it pays."""

import pytest
import torch
from started_ranks import run_on_ranks

from dp_lightning.postprocess import Chain, MagnitudeScale, Momentum, Orthogonalize
from dp_lightning.postprocess.sharing import _owners
from dp_lightning.ranks import Ranks

SHAPES = {"stem": (8, 3, 3, 3), "norm": (8,), "a": (16, 8, 3, 3), "b": (16, 8, 3, 3), "tall": (40, 10), "bias": (10,)}


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def transforms():
    return [Momentum(0.9), MagnitudeScale(Orthogonalize())]


def apply(folder):
    """Three steps of a chain on one of several ranks; runs in a process of its own."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    computed = []
    update = Orthogonalize.update

    def noted(self, chosen, state, noise):
        computed.append(sorted(chosen))
        return update(self, chosen, state, noise)

    Orthogonalize.update = noted
    # A rank that computed everything by itself would show it here.
    chain = Chain(transforms(), ranks=Ranks(rank, size, operations_per_byte=1e-9))
    results = [chain(gradients(step)) for step in range(3)]
    torch.save({"results": results, "computed": computed, "state": chain.state_dict()}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_share_the_work_and_agree_bit_for_bit(tmp_path):
    ended = run_on_ranks(apply, tmp_path, 2, str(tmp_path))
    assert ended.codes == [0, 0], ended.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    alone = Chain(transforms())
    for step in range(3):
        expected = alone(gradients(step))
        assert list(ranks[0]["results"][step]) == list(SHAPES)
        for name in SHAPES:
            assert all(torch.equal(rank["results"][step][name], ranks[0]["results"][step][name]) for rank in ranks)
            torch.testing.assert_close(ranks[0]["results"][step][name], expected[name], rtol=1e-4, atol=1e-5)
        # Each matrix by one rank.
        together = [name for rank in ranks for name in rank["computed"][step]]
        assert sorted(together) == sorted(name for name, shape in SHAPES.items() if len(shape) > 1)
    for rank in ranks:
        torch.testing.assert_close(rank["state"], alone.state_dict(), rtol=0, atol=0)


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
