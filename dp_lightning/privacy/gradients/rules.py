"""Rules: how the per-example gradients of a function's weights follow from the inputs of the function.

A rule belongs to a function of torch, or to one of your own. A function without a rule is correct too: each example
gets a copy of the weight. A rule saves that memory and time::

    def shift_gradients(call, gradient):  # (b * K, n), where the K rows of an example follow each other
        return {"shift": gradient.unflatten(0, (-1, call.rows)).sum(1)}

    shifted = register_rule(
        shifted, Rule(("input", "shift"), ("shift",), lambda x, arguments: 1, per_example(shift_gradients))
    )
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.contribution import Call, Contribution, PerExample
from dp_lightning.privacy.gradients.convolution import (
    Geometry,
    Patches,
    TransposedPatches,
    by_dimension,
    geometry,
)
from dp_lightning.privacy.gradients.linear import Tokens
from dp_lightning.privacy.gradients.normalization import (
    NormRule,
    folded_group_norm,
    group_norm,
    layer_norm,
)
from dp_lightning.privacy.gradients.products import product

RowDims = Callable[[Tensor, Mapping[str, Any]], int]
"""Maps one example's first argument, and the others by name, to the number of dimensions of one row of it."""


Folded = Callable[[Tensor, Mapping[str, Any], Callable[[str], Tensor]], Tensor]
"""Maps rows (n, ...), the other arguments by name, and a function from the name of a weight to one for each row,
(n, *shape), to the output, or to ``NotImplemented`` before it asks for a weight."""


@dataclass(frozen=True)
class Rule:
    """What a private step has to know about a function.

    Args:
        arguments: names of the arguments in order; the first is the input, whose rows are treated independently.
        trained: names of the arguments that may be trained.
        row_dims: how many dimensions one row of the first argument has. The dimensions before count rows.
        contribution: maps a call, and the gradient of the loss with respect to its output (b * K, ...), to the
            gradients of each example, summed over its rows; ``per_example`` makes it from a simple function.
        options: names of the other arguments that the rule covers. The function is called for all rows at once, so an
            option must mean the same for rows of any number: a dimension counts from the end, or ``applies`` refuses
            the call. A call that gives another argument is recorded with copies.
        applies: whether the rule covers a call with these arguments. Otherwise the call is recorded with copies.
        folded: another way through the function, in one call in which each row has weights of its own, so that the
            function's backward pass gives the rows' gradients. Where it is not implemented, ``contribution`` is used.
    """

    arguments: tuple[str, ...]
    trained: tuple[str, ...]
    row_dims: RowDims
    contribution: Callable[[Call, Tensor], Contribution]
    options: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    folded: Folded | None = None

    def covers(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments, its input left out, is recorded by the rule."""
        return arguments.keys() <= {*self.trained, *self.options} and self.applies(arguments)


RULES: dict[Callable[..., Any], Rule] = {}
"""Rules by function, as a torch function mode sees the function."""


def register_rule(function: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """Give a function a rule.

    Args:
        function: one of torch, or your own.
        rule: the rule for it.

    Returns:
        The function to call: the function itself if it is one of torch, otherwise a wrapper whose calls are seen.
    """
    if (getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch":
        RULES[function] = rule
        return function

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(seen, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    RULES[seen] = rule
    return seen


def per_example(gradients: Callable[[Call, Tensor], Mapping[str, Tensor]]) -> Callable[[Call, Tensor], Contribution]:
    """A rule's ``contribution`` from a function that returns the gradients themselves.

    Args:
        gradients: gets the call and the gradient of its output, (b * K, ...); returns (b, *shape) by argument.
    """

    def contribution(call: Call, gradient: Tensor) -> Contribution:
        found = gradients(call, gradient)
        return PerExample({name: found[own] for own, name in call.names.items()})

    return contribution


def _embedding(call: Call, gradient: Tensor) -> Contribution:
    """Of a table: in the row of each index, the sum of the output gradients where the index occurs."""
    indices = call.inputs.reshape(len(call.inputs) // call.rows, -1)
    rows = gradient.reshape(*indices.shape, gradient.shape[-1])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if (padding := call.arguments.get("padding_idx")) is not None:
        rows = rows.masked_fill((indices == padding % len(call.arguments["weight"])).unsqueeze(2), 0.0)
    table = rows.new_zeros(len(rows), *call.arguments["weight"].shape)
    table.scatter_add_(1, indices.unsqueeze(2).expand_as(rows), rows)
    return PerExample({call.names["weight"]: table})


def _geometry(call: Call) -> Geometry:
    names = ("stride", "padding", "dilation", "groups")
    found = {name: call.arguments[name] for name in names if name in call.arguments}
    return geometry(call.arguments["weight"].shape, **found)


def _is_known_transposed(arguments: Mapping[str, Any]) -> bool:
    """Whether the call is the gradient of a convolution with as many positions."""
    dims = arguments["weight"].dim() - 2
    extra = by_dimension(arguments.get("output_padding", 0), dims)
    return all(more < step for more, step in zip(extra, by_dimension(arguments.get("stride", 1), dims), strict=True))


def _is_known_embedding(arguments: Mapping[str, Any]) -> bool:
    if arguments.get("scale_grad_by_freq") or arguments.get("max_norm") is not None:
        raise ModelError(
            "An embedding with scale_grad_by_freq or max_norm looks at the whole batch, or changes its weight while it "
            "is used. Leave both out."
        )
    return True


def _of_weight(x: Tensor, arguments: Mapping[str, Any]) -> int:
    dims: int = arguments["weight"].dim() - 1
    return dims


_CONVOLUTION = Rule(
    ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    ("weight", "bias"),
    _of_weight,
    lambda call, gradient: product(Patches(_geometry(call), call.inputs, gradient, call.rows), call.names),
    ("stride", "padding", "dilation", "groups"),
)
_TRANSPOSED = Rule(
    ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    ("weight", "bias"),
    _of_weight,
    lambda call, gradient: product(TransposedPatches(_geometry(call), call.inputs, gradient, call.rows), call.names),
    ("stride", "padding", "output_padding", "groups", "dilation"),
    _is_known_transposed,
)
RULES.update(
    {
        F.linear: Rule(
            ("input", "weight", "bias"),
            ("weight", "bias"),
            _of_weight,
            lambda call, gradient: product(Tokens.of_rows(call.inputs, gradient, call.rows), call.names),
        ),
        torch.conv1d: _CONVOLUTION,
        torch.conv2d: _CONVOLUTION,
        torch.conv3d: _CONVOLUTION,
        torch.conv_transpose1d: _TRANSPOSED,
        torch.conv_transpose2d: _TRANSPOSED,
        torch.conv_transpose3d: _TRANSPOSED,
        F.embedding: Rule(
            ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
            ("weight",),
            lambda x, arguments: x.dim(),
            _embedding,
            ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
            _is_known_embedding,
        ),
        F.group_norm: Rule(
            ("input", "num_groups", "weight", "bias", "eps"),
            ("weight", "bias"),
            lambda x, arguments: x.dim() - 1,
            NormRule(group_norm, channels=True),
            ("num_groups", "eps"),
            folded=folded_group_norm,
        ),
        F.layer_norm: Rule(
            ("input", "normalized_shape", "weight", "bias", "eps"),
            ("weight", "bias"),
            lambda x, arguments: len(arguments["normalized_shape"]),
            NormRule(layer_norm, channels=False),
            ("normalized_shape", "eps"),
        ),
    }
)
