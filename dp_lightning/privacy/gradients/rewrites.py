"""Functions of torch, written with others: what vmap cannot run, and weights that a function hides.

A ``TorchFunctionMode`` sees ``F.multi_head_attention_forward`` or ``torch.lstm`` as one call and none of the calls
inside it. ``REWRITES`` maps such a function to one that takes the same arguments and returns the same values, but
reaches its weights by calls of ``F.linear`` that the mode sees. Matrix products with a weight are in the table too:
they are linear layers under another name. So are functions that vmap cannot run, or runs slowly.

A rewrite returns ``NotImplemented`` where it does not cover the arguments; the caller then calls the original. All of
them run under ``torch.func.vmap``. A mode is switched off inside its own handler, so the handler calls a rewrite under
``with self:``.
"""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning.privacy.gradients.cost_model import examples_at_a_time
from dp_lightning.torch_internals import below_transforms, is_batched, level, unwrapped, wrapped

# With fewer, channels-last images are no faster.
_CHANNELS = 4

State = Sequence[Tensor]  # (h,) or, of an LSTM, (h, c)


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not hand itself to a mode, so that the mode sees the calls inside.

    Other functions of its module stay as they are.
    """
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return functools.update_wrapper(
        FunctionType(function.__code__, names, argdefs=function.__defaults__, closure=function.__closure__), function
    )


multi_head_attention_forward = _opened(F.multi_head_attention_forward)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention``, once on the rows of all examples; ``query``: (..., heads, L, E).

    A mask that needs a gradient has no batching rule on a CPU.
    """

    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    batched = [tensor for tensor in tensors if is_batched(tensor)]
    if not batched or level() != 1 or any(tensor.requires_grad for tensor in tensors if not is_batched(tensor)):
        return NotImplemented  # inside an inner transform, or with a weight that has no copies yet
    if max(tensor.dim() for tensor in tensors) > query.dim():
        raise ValueError("Key, value and mask of attention must have at most as many dimensions as the query.")
    lead, batch_size = query.shape[:-3], len(unwrapped(batched[0]))

    def rows(tensor: Tensor) -> Tensor:
        """(b * lead, ...) of a tensor that may have fewer dimensions than the query."""
        dims, shape = query.dim() - tensor.dim(), tensor.shape
        inner = unwrapped(tensor) if is_batched(tensor) else tensor.expand(batch_size, *shape)
        inner = inner.reshape(batch_size, *[1] * dims, *shape)
        if not lead:
            return inner
        return inner.expand(batch_size, *lead, *inner.shape[1 + len(lead) :]).flatten(0, len(lead))

    with below_transforms():
        if attn_mask is not None and (is_batched(attn_mask) or attn_mask.dim() > 3):
            attn_mask = rows(attn_mask)
        q, k, v = (rows(tensor) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)
        return wrapped(out.unflatten(0, (batch_size, *lead)) if lead else out, 1)


def _lstm_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    h, c = state
    i, f, g, o = (gates + F.linear(h, w_hh, b_hh)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    (h,) = state
    (r, z, n), (r_h, z_h, n_h) = gates.chunk(3, dim=-1), F.linear(h, w_hh, b_hh).chunk(3, dim=-1)
    n = (n + (r + r_h).sigmoid() * n_h).tanh()
    return (n + (z + z_h).sigmoid() * (h - n),)


def _rnn_tanh_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates + F.linear(state[0], w_hh, b_hh)).tanh(),)


def _rnn_relu_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates + F.linear(state[0], w_hh, b_hh)).relu(),)


def _recurrent(step: Callable[..., State]) -> Callable[..., tuple[Tensor, ...]]:
    """``torch.lstm``, ``torch.gru``, …, of padded sequences and without projections.

    They take (T, N, features), or (N, T, features) if ``batch_first``, and states (layers * directions, N, hidden).
    """

    def rewritten(*args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        if keywords or not isinstance(args[3], bool):  # torch's modules pass no keyword; packed sequences another order
            return NotImplemented
        x, hx, params, has_biases, _, dropout, train, bidirectional, batch_first = args
        states = hx if isinstance(hx, tuple | list) else (hx,)
        directions, count = 1 + bidirectional, 4 if has_biases else 2
        if len(params) != count * len(states[0]):  # a projection has one weight more
            return NotImplemented
        x = x.transpose(0, 1) if batch_first else x
        outputs: list[Tensor] = []
        final: list[State] = []
        for i, state in enumerate(zip(*(s.unbind() for s in states), strict=True)):  # i: layer * directions + direction
            if i > 0 and i % directions == 0:
                x, outputs = F.dropout(torch.cat(outputs, dim=-1), dropout if train else 0.0), []
            output, last = _direction(step, x, state, params[i * count : (i + 1) * count], reverse=i % directions == 1)
            outputs.append(output)
            final.append(last)
        output = torch.cat(outputs, dim=-1)
        return output.transpose(0, 1) if batch_first else output, *map(torch.stack, zip(*final, strict=True))

    return rewritten


def _direction(
    step: Callable[..., State], x: Tensor, state: State, weights: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, State]:
    """The outputs (T, N, hidden) of one layer in one direction, and its final state."""
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    gates = F.linear(x, w_ih, b_ih)
    # Each example has its own state, so that the first step uses w_hh in the same way as every other step.
    state = [s + torch.zeros_like(gates[0, :, :1]) for s in state]
    outputs = []
    for gate in reversed(gates.unbind()) if reverse else gates.unbind():
        state = step(gate, state, w_hh, b_hh)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _is_weight(x: Tensor) -> bool:
    """Whether x is a matrix that all examples share. Outside of vmap, every matrix is one."""
    return x.dim() == 2 and not is_batched(x)


def matmul(input: Tensor, other: Tensor | None = None, *dtype: torch.dtype, **options: Any) -> Tensor:
    """``torch.matmul``, ``mm`` and ``mv`` with a weight on the right, (in, out), or else on the left, (out, in)."""
    if other is None or dtype or options:  # mm and mv have other names for it; out and dtype are not covered
        return NotImplemented
    if _is_weight(other):
        return F.linear(input, other.mT)
    if _is_weight(input):
        return F.linear(other, input) if other.dim() == 1 else F.linear(other.mT, input).mT
    return NotImplemented


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """``torch.prelu`` with the type promotion that autocast needs and vmap lacks; ``weight``: (channels) or (1)."""
    slope = weight.to(input.dtype)
    if len(slope) > 1:
        slope = slope.reshape(-1, *[1] * max(input.dim() - 2, 0))
    return torch.where(input > 0, input, slope * input)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` with class weights and label smoothing; ``input``: (C), (N, C) or (N, C, ...)."""
    if weight is None or not label_smoothing or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point():
        return NotImplemented
    dim = min(input.dim() - 1, 1)
    log_probabilities = F.log_softmax(input, dim)
    counted = target != ignore_index
    classes = target.where(counted, 0)
    of_class = weight[classes].where(counted, 0)
    likelihood = log_probabilities.gather(dim, classes.unsqueeze(dim)).squeeze(dim) * of_class
    weights = weight.view(-1, *[1] * (input.dim() - dim - 1))
    smooth = (log_probabilities * weights).sum(dim)
    losses = -((1 - label_smoothing) * likelihood + label_smoothing / len(weight) * smooth).where(counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() / of_class.sum() if reduction == "mean" else losses.sum()


def max_pool2d(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """``F.max_pool2d`` of contiguous images, whose maxima a CPU finds several times faster in channels-last ones."""
    if level() != 1 or not is_batched(input) or input.dim() not in (3, 4) or len(args) > 5:
        return NotImplemented
    rows, options = unwrapped(input), {**options, "return_indices": True}
    with below_transforms():
        if rows.device.type != "cpu" or rows.shape[-3] < _CHANNELS or not rows.is_contiguous():
            return NotImplemented
        found = []
        for images in rows.detach().flatten(0, -4).split(examples_at_a_time(8 * rows[0].numel(), rows.device)):
            images = images.contiguous(memory_format=torch.channels_last)
            found.append(F.max_pool2d(images, *args, **options)[1].contiguous())
        places = torch.cat(found).unflatten(0, rows.shape[:-3])
        return wrapped(rows.flatten(-2).gather(-1, places.flatten(-2)).view_as(places), 1)


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[mask] = value`` for a number, or a row that replaces each selected row."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not is_batched(index):
        return NotImplemented
    rows = tensor.dim() - index.dim()
    if isinstance(value, Tensor) and value.dim() > rows:
        return NotImplemented
    mask = index.view(*index.shape, *[1] * rows)
    if isinstance(value, Tensor):
        tensor.copy_(torch.where(mask, value.to(tensor.dtype), tensor))
    else:
        tensor.masked_fill_(mask, value)


# By the function that a mode receives; the modules of torch call the same ones through ``torch._VF``.
REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    torch.lstm: _recurrent(_lstm_step),
    torch.gru: _recurrent(_gru_step),
    torch.rnn_tanh: _recurrent(_rnn_tanh_step),
    torch.rnn_relu: _recurrent(_rnn_relu_step),
    torch.matmul: matmul,
    torch.linalg.matmul: matmul,
    Tensor.matmul: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.mv: matmul,
    Tensor.mv: matmul,
    torch.prelu: prelu,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.cross_entropy: cross_entropy,
    F.max_pool2d: max_pool2d,
    Tensor.__setitem__: set_item,
}
