"""Distributes the parameters of an expensive transform over the ranks, so that each result is computed once.

The privatized gradient is the same on every rank, so without this every rank computes the same result. Whether to
distribute depends on shapes alone, so all ranks decide alike.
"""

from collections.abc import Mapping

from torch import Tensor

from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform
from dp_lightning.ranks import Ranks


def apply_on_ranks(
    transform: Transform, gradients: Gradients, state: State, noise: Noise, ranks: Ranks
) -> tuple[Gradients, State]:
    """``transform.apply``, with the work distributed over ``ranks`` if that is faster; every rank must call it.

    Returns:
        What ``transform.apply`` returns, the same bits on every rank. It may be rounded differently from the
        result without ranks, since matrices of one shape are then computed in smaller batches.
    """
    owners = _owners(transform, gradients, ranks)
    if not owners:
        return transform.apply(gradients, state, noise)
    mine = {name: value for name, value in gradients.items() if owners.get(name, ranks.rank) == ranks.rank}
    computed, state = transform.apply(mine, state, noise)
    shares = [[name for name, owner in owners.items() if owner == rank] for rank in range(ranks.size)]
    gathered = ranks.gather(
        [computed[name] for name in shares[ranks.rank]], like=[[gradients[name] for name in names] for names in shares]
    )
    for names, values in zip(shares, gathered, strict=True):
        computed.update(zip(names, values, strict=True))
    return {name: computed[name] for name in gradients}, state


def _owners(transform: Transform, gradients: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """The rank that computes each parameter worth distributing; empty if every rank should compute all of them."""
    if ranks.size == 1:
        return {}
    sizes = {name: value.numel() * value.element_size() for name, value in gradients.items()}
    chosen = [name for name, value in gradients.items() if transform.selects(name, value.shape)]
    costs = {name: transform.cost(gradients[name].shape) for name in chosen}
    spared = 1 - 1 / ranks.size
    worth = [name for name in chosen if spared * costs[name] > ranks.operations_per_byte * sizes[name]]
    if len({(gradients[name].dtype, gradients[name].device) for name in worth}) != 1:
        return {}
    loads, sent = [0.0] * ranks.size, [0] * ranks.size
    owners = {}
    # The longest first, each to the rank with the least work (Graham 1969).
    for name in sorted(worth, key=lambda name: -costs[name]):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += costs[name]
        sent[owner] += sizes[name]
    gain = sum(loads) - max(loads)
    price = ranks.operations_per_byte * ranks.size * max(sent) + ranks.operations_per_call
    return owners if gain > price else {}
