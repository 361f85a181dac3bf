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
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning import torch_internals
from dp_lightning.privacy.gradients.vmap import unwrapped, wrapped
from dp_lightning.torch_internals import below_transforms, is_batched, level

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


def _lstm_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None) -> State:
    h, c = state
    i, f, g, o = (gates + F.linear(h, w_hh, b_hh)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if w_hr is None else F.linear(h, w_hr), c


def _gru_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    (h,) = state
    (r, z, n), (r_h, z_h, n_h) = gates.chunk(3, dim=-1), F.linear(h, w_hh, b_hh).chunk(3, dim=-1)
    n = (n + (r + r_h).sigmoid() * n_h).tanh()
    return (n + (z + z_h).sigmoid() * (h - n),)


def _rnn_tanh_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates + F.linear(state[0], w_hh, b_hh)).tanh(),)


def _rnn_relu_step(gates: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates + F.linear(state[0], w_hh, b_hh)).relu(),)


def _layers(
    step: Callable[..., State],
    rows: Tensor,
    sizes: list[int],
    hx: State,
    params: Sequence[Tensor],
    has_biases: bool,
    dropout: float,
    directions: int,
) -> tuple[Tensor, ...]:
    """All layers of a recurrent network. Returns the last layer's output, as ``rows``, and the final states, as ``hx``.

    ``rows``: (sum of ``sizes``, features), time step t holding the first ``sizes[t]`` sequences; ``hx``: (layers *
    directions, N, features) each.
    """
    count = len(params) // len(hx[0])
    outputs: list[Tensor] = []
    final: list[State] = []
    for i, state in enumerate(zip(*(s.unbind() for s in hx), strict=True)):  # i: layer * directions + direction
        if i > 0 and i % directions == 0:
            rows, outputs = F.dropout(torch.cat(outputs, dim=-1), dropout), []
        weights = params[i * count : (i + 1) * count]
        output, last = _direction(step, rows, sizes, state, weights, has_biases, reverse=i % directions == 1)
        outputs.append(output)
        final.append(last)
    return torch.cat(outputs, dim=-1), *(torch.stack(states) for states in zip(*final, strict=True))


def _direction(
    step: Callable[..., State],
    rows: Tensor,
    sizes: list[int],
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, State]:
    """One layer in one direction. A sequence keeps its state after its end or, in reverse, before its beginning."""
    w_ih, w_hh, *rest = weights
    (b_ih, b_hh), w_hr = (rest[:2], rest[2:]) if has_biases else ((None, None), rest)
    gates = F.linear(rows, w_ih, b_ih).split(sizes)
    state = _per_example(state, gates[0])
    outputs = []
    for gate in reversed(gates) if reverse else gates:
        n = len(gate)
        updated = step(gate, [s[:n] for s in state], w_hh, b_hh, *w_hr)
        outputs.append(updated[0])
        state = [torch.cat([new, old[n:]]) if n < len(old) else new for new, old in zip(updated, state, strict=True)]
    return torch.cat(outputs[::-1] if reverse else outputs), state


def _per_example(state: State, gates: Tensor) -> State:
    """Give each example its own state, so that the first step uses w_hh in the same way as every other step."""
    return [s + torch.zeros_like(gates[:, :1]) for s in state]


def _recurrent(step: Callable[..., State]) -> Callable[..., tuple[Tensor, ...]]:
    """``torch.lstm``, ``torch.gru``, …: (input, hx, …, batch_first), or packed: (data, batch_sizes, hx, …)."""

    def rewritten(*args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        if keywords:  # no module of torch passes any
            return NotImplemented
        padded = isinstance(args[3], bool)
        rows, *sizes, hx, params, has_biases, _, dropout, train, bidirectional = args[:8] if padded else args
        hx = hx if isinstance(hx, tuple | list) else (hx,)
        options = params, has_biases, dropout if train else 0.0, 1 + bidirectional
        if not padded:
            if is_batched(sizes[0]):
                raise NotImplementedError(
                    "Under vmap, the lengths of a packed sequence differ from example to example. Use padded input."
                )
            return _layers(step, rows, sizes[0].tolist(), hx, *options)
        steps_first = rows.transpose(0, 1) if args[8] else rows
        t, n = steps_first.shape[:2]
        output, *states = _layers(step, steps_first.flatten(0, 1), [n] * t, hx, *options)
        output = output.unflatten(0, (t, n))
        return output.transpose(0, 1) if args[8] else output, *states

    return rewritten


def _cell(step: Callable[..., State]) -> Callable[..., Tensor | State]:
    """``torch.lstm_cell``, ``torch.gru_cell``, …; ``input``: (N, features), ``hx``: (N, features) each."""

    def rewritten(
        input: Tensor,
        hx: Tensor | State,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        gates = F.linear(input, w_ih, b_ih)
        state = step(gates, _per_example(hx if isinstance(hx, tuple | list) else (hx,), gates), w_hh, b_hh)
        return state if len(state) == 2 else state[0]

    return rewritten


lstm, lstm_cell = _recurrent(_lstm_step), _cell(_lstm_step)
gru, gru_cell = _recurrent(_gru_step), _cell(_gru_step)
rnn_tanh, rnn_tanh_cell = _recurrent(_rnn_tanh_step), _cell(_rnn_tanh_step)
rnn_relu, rnn_relu_cell = _recurrent(_rnn_relu_step), _cell(_rnn_relu_step)


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


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *dtype: torch.dtype, beta: float = 1, alpha: float = 1, **options: Any
) -> Tensor:
    """``torch.addmm`` without alpha and beta; ``input``: a bias (out), or anything that broadcasts to the product."""
    if dtype or options or beta != 1 or alpha != 1:
        return NotImplemented
    if _is_weight(mat2) and input.shape == mat2.shape[1:]:
        return F.linear(mat1, mat2.mT, input)
    product = matmul(mat1, mat2)
    return product if product is NotImplemented else product + input


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.bilinear``, a linear layer on the products of both inputs' features; ``weight``: (out, in1, in2)."""
    return F.linear((input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), weight.flatten(1), bias)


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


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``F.gaussian_nll_loss``, without the check for negative variances, which count as ``eps``."""
    var = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp_min(eps) - var).detach()
    losses = (var.log() + (input - target).square() / var + (math.log(2 * math.pi) if full else 0.0)) / 2
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


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


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``F.grouped_mm`` of rows (S, in) in groups that end at ``offs``, with a matrix (in, out) for each group.

    Each matrix multiplies all rows, so the cost is multiplied by the number of groups.
    """
    if offs is None or bias is not None or out_dtype is not None or mat_a.dim() != 2 or mat_b.dim() != 3:
        return NotImplemented
    group = (torch.arange(len(mat_a), device=mat_a.device).unsqueeze(1) >= offs).sum(1, keepdim=True)
    total = mat_a.new_zeros(len(mat_a), mat_b.shape[-1])
    for number, weight in enumerate(mat_b.unbind()):
        total = total + torch.where(group == number, mat_a @ weight, 0.0)
    return total


# By the function that a mode receives; the modules of torch call the same ones through ``torch._VF``.
REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
    torch.rnn_tanh_cell: rnn_tanh_cell,
    torch.rnn_relu_cell: rnn_relu_cell,
    torch.matmul: matmul,
    torch.linalg.matmul: matmul,
    Tensor.matmul: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.mv: matmul,
    Tensor.mv: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch.bilinear: bilinear,
    torch.prelu: prelu,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.cross_entropy: cross_entropy,
    F.gaussian_nll_loss: gaussian_nll_loss,
    Tensor.__setitem__: set_item,
    F.grouped_mm: grouped_mm,
    torch_internals.grouped_mm: grouped_mm,
}
