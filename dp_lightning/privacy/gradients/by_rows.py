"""Kernels that treat rows independently and that vmap cannot run, or runs slowly: run once on the rows of all examples.

Attention with a mask that needs a gradient has no batching rule on a CPU. It is assumed, not checked, that the kernel
treats rows independently.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

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


BY_ROWS: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _attention}
"""By function: as a function of b and its arguments, with the example dimension first. They run below vmap."""
