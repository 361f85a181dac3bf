"""Composite torch functions, rewritten so that each trained weight is an argument of ``F.linear``.

A ``TorchFunctionMode`` sees ``F.multi_head_attention_forward`` or ``torch.lstm`` as one call and none of the calls
inside it. ``REWRITES`` maps such a function to a Python function that takes the same arguments and returns the same
values, but reaches its weights through calls that the mode sees. Matrix products with a weight are in the table too:
they are linear layers under another name.

A rewrite returns ``NotImplemented`` where it does not cover the arguments; the caller then calls the original. All of
them run under ``torch.func.vmap``. A mode is switched off inside its own handler, so the handler calls a rewrite under
``with self:``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_lightning.torch_internals import is_batched

State = Sequence[Tensor]  # (h,) or, of an LSTM, (h, c)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` of torch 2.11 to 2.14, with an ``F.linear`` for each projection.

    ``query``: (L, N, E) or (L, E); ``key``, ``value``: (S, N, features) or (S, features). Returns the values,
    (L, N, E) or (L, E), and the weights, (N, L, S) or (L, S), per head (N, heads, L, S) or (heads, L, S).
    """
    if unknown:
        raise NotImplementedError(f"multi_head_attention_forward: unknown arguments of this torch: {sorted(unknown)}.")
    if query.shape[-1] != embed_dim_to_check:
        raise ValueError(f"The query has {query.shape[-1]} features; the attention has {embed_dim_to_check}.")
    if (bias_k is None) != (bias_v is None):
        raise ValueError("bias_k and bias_v must be given together.")
    if bias_k is not None and (static_k is not None or static_v is not None):
        raise ValueError("A bias cannot be added to a static key or value.")
    if is_causal and attn_mask is None:
        raise ValueError("is_causal says that attn_mask is causal, so it needs attn_mask.")

    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _separate_projections((query, key, value), weights, in_proj_bias)
    elif in_proj_weight is None:
        raise ValueError("Without use_separate_proj_weight, in_proj_weight is required.")
    else:
        q, k, v = _packed_projections(query, key, value, in_proj_weight, in_proj_bias)
    unbatched = query.dim() == 2
    if unbatched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # the hint alone reaches scaled_dot_product_attention, as in torch
    lengths = (q.shape[1], num_heads, q.shape[0], k.shape[0])
    mask = _additive_mask(attn_mask, key_padding_mask, lengths, q.dtype)

    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, k.shape[1], -1)])
        v = torch.cat([v, bias_v.expand(1, v.shape[1], -1)])
    q, k, v = (x.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # (N, heads, L or S, features)
    k = k if static_k is None else static_k.unflatten(0, (-1, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (-1, num_heads))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, int(bias_k is not None) + int(add_zero_attn)))

    attention = None
    if need_weights:
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
        scores = scores if mask is None else scores + mask
        attention = F.dropout(F.softmax(scores, dim=-1), dropout_p, training)
        values = torch.matmul(attention, v)
        attention = attention.mean(dim=1) if average_attn_weights else attention
    else:
        dropout_p = dropout_p if training else 0.0
        values = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal and mask is None)
    output = F.linear(values.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if unbatched:
        return output.squeeze(1), None if attention is None else attention.squeeze(0)
    return output, attention


def _separate_projections(
    inputs: Sequence[Tensor], weights: Sequence[Tensor | None], bias: Tensor | None
) -> Sequence[Tensor]:
    """One ``F.linear`` each of query, key and value; ``bias``: (3 E)."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]  # type: ignore[arg-type]


def _packed_projections(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> Sequence[Tensor]:
    """As few ``F.linear`` calls as there are different inputs; ``weight``: (3 E, E), ``bias``: (3 E)."""
    if key is not value:
        return _separate_projections((query, key, value), weight.chunk(3), bias)
    if query is key:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    parts = [len(weight) // 3, 2 * len(weight) // 3]
    weight_q, weight_kv = weight.split(parts)
    bias_q, bias_kv = (None, None) if bias is None else bias.split(parts)
    return F.linear(query, weight_q, bias_q), *F.linear(key, weight_kv, bias_kv).chunk(2, dim=-1)


def _additive_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, lengths: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """The sum of both masks, broadcast to ``lengths`` = (N, heads, L, S); -inf where a boolean mask is true."""
    n, heads, target, source = lengths
    masks = []
    if attn_mask is not None:
        if attn_mask.shape not in ((target, source), (n * heads, target, source)):
            raise ValueError(f"attn_mask has the shape {tuple(attn_mask.shape)}; lengths (N, heads, L, S): {lengths}.")
        masks.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (n, heads)))
    if key_padding_mask is not None:
        if key_padding_mask.shape != (n, source):
            raise ValueError(f"key_padding_mask has the shape {tuple(key_padding_mask.shape)}, not {(n, source)}.")
        masks.append(key_padding_mask[:, None, None])
    added = [
        mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
        for mask in masks
    ]
    return added[0] + added[1] if len(added) == 2 else added[0] if added else None


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
}
