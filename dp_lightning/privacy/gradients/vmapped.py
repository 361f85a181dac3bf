"""Any other module: the vector-Jacobian product of that module alone, example by example.

The module runs again on each example by itself, so that its per-example gradients are exact whatever it does inside,
as long as it treats the first dimension of its inputs as the batch. The examples are vmapped; a module that vmap cannot
run (recurrent layers change tensors in place) takes them one after the other.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def vmapped_gradients(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grad_outputs: list[Tensor | None],
    wanted: frozenset[str],
    batch_size: int,
) -> dict[str, Tensor]:
    """Per-example gradients (b, *parameter.shape) of ``wanted``, the module's own names of its parameters.

    Args:
        module: the module as a function of its parameters.
        args: positional inputs; tensors with ``batch_size`` rows are cut into examples, others are passed whole.
        kwargs: keyword inputs, likewise.
        grad_outputs: gradients of the output's tensors, in the order of the flattened output; None where the loss
            does not depend on one.
        wanted: names of the trained parameters.
        batch_size: number of examples b.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = {name: state[name].detach() for name in wanted}
    rest = {name: tensor.detach() for name, tensor in state.items() if name not in wanted}
    leaves, spec = tree_flatten((args, dict(kwargs)))
    batched = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size for leaf in leaves]
    rows = [leaf.detach() for leaf, is_batched in zip(leaves, batched, strict=True) if is_batched]
    used = [index for index, gradient in enumerate(grad_outputs) if gradient is not None]
    gradients = tuple(gradient for gradient in grad_outputs if gradient is not None)

    def one_example(example: list[Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = iter(example)
        mine = [
            next(values).unsqueeze(0) if is_batched else leaf for leaf, is_batched in zip(leaves, batched, strict=True)
        ]
        my_args, my_kwargs = tree_unflatten(mine, spec)

        def run(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            output = torch.func.functional_call(module, {**parameters, **rest}, my_args, my_kwargs)
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            return tuple(tensors[index] for index in used)

        outputs, pullback, *_ = torch.func.vjp(run, trained)
        cotangents = tuple(grad.unsqueeze(0).to(output.dtype) for grad, output in zip(grads, outputs, strict=True))
        return pullback(cotangents)[0]

    try:
        return torch.func.vmap(one_example, randomness="error")(rows, gradients)
    except RuntimeError as error:
        if "random" in str(error):
            raise
        warnings.warn(
            f"{type(module).__name__} cannot be vmapped, so its examples are taken one after the other, which is slow.",
            stacklevel=2,
        )
    singles = [
        one_example([row[i] for row in rows], tuple(gradient[i] for gradient in gradients)) for i in range(batch_size)
    ]
    return {name: torch.stack([single[name] for single in singles]) for name in singles[0]}
