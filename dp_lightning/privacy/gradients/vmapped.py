"""Any other module: the vector-Jacobian product of that module alone, example by example.

The module runs again on each example by itself, so that its per-example gradients are exact whatever it does inside,
as long as it treats the first dimension of its inputs as the batch. That is checked: the gradients by example have to
add up to that of the batch. Which inputs have a row for each view is told by their first dimension. A tensor for all
examples, such as a rotary table or the mask of an attention, may have as many rows by chance: where several inputs
have, the outputs by example have to be those of the batch too, and where that does not hold, fewer are cut. The
examples are vmapped; a module that vmap cannot run (recurrent layers change tensors in place) takes them one after the
other.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dp_lightning.privacy.gradients.contribution import flat_rows

# Relative rounding of 16-bit gradients, with room to add up.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_Key = TypeVar("_Key")
# Ways of cutting the inputs that are tried.
_MOST = 64


def vmapped_gradients(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grad_outputs: list[Tensor | None],
    wanted: frozenset[str],
    batch_size: int,
    augmult: int,
) -> dict[str, Tensor]:
    """Per-example gradients (b, *parameter.shape) of ``wanted``, the module's own names of its parameters.

    Args:
        module: the module as a function of its parameters.
        args: positional inputs; tensors with a row for every view are cut into examples, others are passed whole.
            Those that autocast has made coarse are taken in the type of the parameters, unless some of the module's own
            tensors are coarse too.
        kwargs: keyword inputs, likewise.
        grad_outputs: gradients of the output's tensors, in the order of the flattened output; None where the loss
            does not depend on one.
        wanted: names of the trained parameters.
        batch_size: number of examples b.
        augmult: K, the views of each example, which follow each other.

    Raises:
        ValueError: when the module draws random numbers, or does not treat its examples apart.
        Exception: whatever the module raises for its examples by themselves.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = {name: state[name].detach() for name in wanted}
    rest = {name: tensor.detach() for name, tensor in state.items() if name not in wanted}
    leaves, spec = tree_flatten((args, dict(kwargs)))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if not any(tensor.dtype in _TOLERANCE for tensor in state.values()):
        dtype = next(iter(trained.values())).dtype
        leaves = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in _TOLERANCE else leaf for leaf in leaves]
    used = [index for index, gradient in enumerate(grad_outputs) if gradient is not None]
    gradients = tuple(gradient for gradient in grad_outputs if gradient is not None)

    def run(parameters: dict[str, Tensor], rows: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """The outputs that the loss depends on, with ``rows`` in the places of inputs."""
        my_args, my_kwargs = tree_unflatten([rows.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        output = torch.func.functional_call(module, {**parameters, **rest}, my_args, my_kwargs)
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        return tuple(tensors[index] for index in used)

    def pull_back(rows: dict[int, Tensor], cotangents: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Gradients of ``trained``, added up over the examples in ``rows``."""
        outputs, pullback, *_ = torch.func.vjp(lambda parameters: run(parameters, rows), trained)
        return pullback(tuple(g.to(output.dtype) for g, output in zip(cotangents, outputs, strict=True)))[0]

    cotangents = tuple(gradient.unflatten(0, (batch_size, augmult)) for gradient in gradients)

    def by_example(batched: tuple[int, ...], *, certain: bool) -> dict[str, Tensor]:
        views = {i: leaves[i].unflatten(0, (batch_size, augmult)) for i in batched}
        if not certain:
            moved = _moved(trained)
            alone = _by_example(module, lambda rows, _: dict(enumerate(run(moved, rows))), views, cotangents)
            _check_outputs(alone, run(moved, {}))
        found = _by_example(module, pull_back, views, cotangents)
        finite = torch.stack([flat_rows(each).isfinite().all(1) for each in found.values()]).all(0)
        if finite.all():
            _check_sum(found, pull_back({}, gradients))
            return found
        if finite.any():
            rows = {i: view[finite].flatten(0, 1) for i, view in views.items()}
            total = pull_back(rows, tuple(gradient[finite].flatten(0, 1) for gradient in cotangents))
            _check_sum({name: each[finite] for name, each in found.items()}, total)
        return found

    ways = list(islice(_ways_to_cut(leaves, batch_size * augmult), _MOST))
    first: Exception | None = None
    for batched in ways:
        try:
            return by_example(batched, certain=len(ways) == 1)
        except Exception as error:  # whatever the module raises when it gets a piece of a table
            first = first or error
    assert first is not None
    raise first


def _moved(trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other parameters, at which no product is zero by chance."""
    generator = torch.Generator().manual_seed(1)
    moved = {}
    for name, value in sorted(trained.items()):
        inputs = value[0].numel() if value.dim() > 1 else 4  # by about the length of a fresh weight
        step = torch.randn(value.shape, generator=generator, dtype=torch.float32) * inputs**-0.5
        moved[name] = value + step.to(value)
    return moved


def _ways_to_cut(leaves: list[Any], count: int) -> Iterator[tuple[int, ...]]:
    """Places of inputs that may be those with a row per view, most of them first; a tensor in two places is one."""
    places: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,):
            places.setdefault(leaf.data_ptr(), []).append(place)
    for size in range(len(places), 0, -1):
        for chosen in combinations(places.values(), size):
            yield tuple(place for same in chosen for place in same)
    if not places:
        yield ()


def _by_example(
    module: nn.Module,
    function: Callable[[dict[int, Tensor], tuple[Tensor, ...]], dict[_Key, Tensor]],
    views: dict[int, Tensor],
    cotangents: tuple[Tensor, ...],
) -> dict[_Key, Tensor]:
    try:
        return torch.func.vmap(function, randomness="error")(views, cotangents)
    except RuntimeError as error:
        if "random" in str(error):
            raise
    singles = [
        function({at: view[i] for at, view in views.items()}, tuple(cotangent[i] for cotangent in cotangents))
        for i in range(len(cotangents[0]))
    ]
    warnings.warn(
        f"{type(module).__name__} cannot be vmapped, so its examples are taken one after the other, which is slow.",
        stacklevel=2,
    )
    return {name: torch.stack([single[name] for single in singles]) for name in singles[0]}


def _check_sum(found: dict[str, Tensor], total: dict[str, Tensor]) -> None:
    """Refuse gradients by example that do not add up to the gradient of the batch."""
    lengths = {name: flat_rows(gradients).norm(dim=1).sum() for name, gradients in found.items()}
    # The gradient of a key's bias in attention is zero, and what is computed is the rounding of the others.
    rounding = 1e-6 * torch.stack(list(lengths.values())).max()
    for name, gradients in found.items():
        error = (gradients.sum(0) - total[name]).norm()
        if not error <= _TOLERANCE.get(gradients.dtype, 1e-3) * lengths[name] + rounding:
            raise ValueError(
                f"the gradients of '{name}' by example do not add up to that of the batch. The module draws random "
                "numbers, or mixes examples."
            )


def _check_outputs(alone: dict[int, Tensor], together: tuple[Tensor, ...]) -> None:
    """Refuse examples that are not by themselves what they are in the batch, finite or not."""
    for index, outputs in alone.items():
        mine, expected = outputs.flatten(0, 1).flatten(1), together[index].flatten(1)
        finite = expected.isfinite().all(1)
        same = torch.equal(mine.isfinite().all(1), finite)
        mine, expected = mine[finite], expected[finite]
        lengths = expected.norm(dim=1)
        allowed = _TOLERANCE.get(expected.dtype, 1e-3) * lengths + 1e-6 * lengths.sum()
        if not same or not ((mine - expected).norm(dim=1) <= allowed).all():
            raise ValueError(
                "an example alone has another output than in its batch. The module draws random numbers, or mixes "
                "examples."
            )
