"""Any other module: the vector-Jacobian product of that module alone, example by example.

The module runs again on each example by itself, so that its per-example gradients are exact whatever it does inside,
as long as it treats the first dimension of its inputs as the batch. That is checked: the gradients by example have to
add up to that of the batch. A tensor for all examples, such as a rotary table, may have as many rows as the batch by
chance; where the sum does not hold, the first tensor alone is taken as the batch. The examples are vmapped; a module
that vmap cannot run (recurrent layers change tensors in place) takes them one after the other.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dp_lightning.privacy.gradients.contribution import flat_rows

# Relative rounding of 16-bit gradients, with room to add up.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}


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
        kwargs: keyword inputs, likewise.
        grad_outputs: gradients of the output's tensors, in the order of the flattened output; None where the loss
            does not depend on one.
        wanted: names of the trained parameters.
        batch_size: number of examples b.
        augmult: K, the views of each example, which follow each other.

    Raises:
        RuntimeError, ValueError: when the module draws random numbers, or does not treat its examples apart.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = {name: state[name].detach() for name in wanted}
    rest = {name: tensor.detach() for name, tensor in state.items() if name not in wanted}
    leaves, spec = tree_flatten((args, dict(kwargs)))
    count = batch_size * augmult
    by_size = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,)]
    used = [index for index, gradient in enumerate(grad_outputs) if gradient is not None]
    cotangents = tuple(g.unflatten(0, (batch_size, augmult)) for g in grad_outputs if g is not None)

    def pull_back(rows: dict[int, Tensor], cotangents: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Gradients of ``trained``, added up over the examples in ``rows``, inputs by their places."""
        my_args, my_kwargs = tree_unflatten([rows.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

        def run(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            output = torch.func.functional_call(module, {**parameters, **rest}, my_args, my_kwargs)
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            return tuple(tensors[index] for index in used)

        outputs, pullback, *_ = torch.func.vjp(run, trained)
        return pullback(tuple(g.to(output.dtype) for g, output in zip(cotangents, outputs, strict=True)))[0]

    def by_example(batched: list[int]) -> dict[str, Tensor]:
        views = {i: leaves[i].detach().unflatten(0, (batch_size, augmult)) for i in batched}
        found = _by_example(module, pull_back, views, cotangents)
        # Only of finite examples is the sum known.
        finite = torch.stack([flat_rows(each).isfinite().all(1) for each in found.values()]).all(0)
        if finite.any():
            rows = {i: view[finite].flatten(0, 1) for i, view in views.items()}
            total = pull_back(rows, tuple(gradient[finite].flatten(0, 1) for gradient in cotangents))
            _check_sum({name: each[finite] for name, each in found.items()}, total)
        return found

    try:
        return by_example(by_size)
    except (RuntimeError, ValueError) as error:
        if len(by_size) < 2:
            raise
        try:
            return by_example(by_size[:1])
        except (RuntimeError, ValueError):
            raise error from None


def _by_example(
    module: nn.Module,
    pull_back: Callable[..., dict[str, Tensor]],
    rows: dict[int, Tensor],
    gradients: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    try:
        return torch.func.vmap(pull_back, randomness="error")(rows, gradients)
    except RuntimeError as error:
        if "random" in str(error):
            raise
    singles = [
        pull_back({at: row[i] for at, row in rows.items()}, tuple(gradient[i] for gradient in gradients))
        for i in range(len(gradients[0]))
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
        if error > _TOLERANCE.get(gradients.dtype, 1e-3) * lengths[name] + rounding:
            raise ValueError(
                f"the gradients of '{name}' by example do not add up to that of the batch. The module draws random "
                "numbers, mixes examples, or gets a tensor before the examples whose first dimension has the batch's "
                "size by chance."
            )
