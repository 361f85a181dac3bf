"""Kernels that treat rows independently and that vmap cannot run, or runs slowly: run once on the rows of all examples.

Attention with a mask that needs a gradient has no batching rule on a CPU, and recurrent layers have none at all. It is
assumed, not checked, that these kernels treat rows independently.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.vmap import unwrapped
from dp_lightning.torch_internals import is_batched


def _attention(
    batch_size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``query``: (..., heads, L, E) of one example."""
    lead = query.shape[:-3]
    if any(tensor is not None and tensor.dim() > query.dim() for tensor in (key, value, attn_mask)):
        raise ValueError("Key, value and mask of attention must have at most as many dimensions as the query.")

    def rows(tensor: Tensor, dims: int) -> Tensor:
        """(b * lead, ...) of a tensor whose own ``dims`` dimensions may be fewer than the query's."""
        inner = unwrapped(tensor) if is_batched(tensor) else tensor.unsqueeze(0).expand(batch_size, *tensor.shape)
        inner = inner.reshape(batch_size, *[1] * (query.dim() - dims), *tensor.shape)
        if not lead:
            return inner
        return inner.expand(batch_size, *lead, *inner.shape[1 + len(lead) :]).flatten(0, len(lead))

    q, k, v = (rows(tensor, tensor.dim()) for tensor in (query, key, value))
    if attn_mask is not None and (is_batched(attn_mask) or attn_mask.dim() > 3):
        attn_mask = rows(attn_mask, attn_mask.dim())
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)
    return out.unflatten(0, (batch_size, *lead)) if lead else out


def _recurrent(kernel: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def run(batch_size: int, *args: Any) -> tuple[Tensor, ...]:
        """``args`` as for ``torch.lstm``: input (t, rows, features) or (rows, t, features) of one example, states."""
        if isinstance(args[3], (list, tuple)):
            raise ModelError("A packed sequence holds several examples. Pad the sequences to one length.")
        x, states, *rest = args
        batch_first, rows = rest[-1], x.shape[0 if rest[-1] else 1]

        def merged(tensor: Tensor, dim: int) -> Tensor:
            inner = unwrapped(tensor) if is_batched(tensor) else tensor.expand(batch_size, *tensor.shape)
            return inner.movedim(0, dim).flatten(dim, dim + 1)

        single = isinstance(states, Tensor)
        states = [merged(state, 1) for state in ([states] if single else states)]
        dim = 0 if batch_first else 1
        out, *last = kernel(merged(x, dim), states[0] if single else tuple(states), *rest)
        return (
            out.unflatten(dim, (batch_size, rows)).movedim(dim, 0),
            *(state.unflatten(1, (batch_size, rows)).movedim(1, 0) for state in last),
        )

    return run


BY_ROWS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    **{kernel: _recurrent(kernel) for kernel in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
"""By function: maps b and its arguments to its results, with the example dimension first. They run below vmap."""
