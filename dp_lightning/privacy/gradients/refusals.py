"""What a step under vmap cannot do: why, and what to write instead."""

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dp_lightning.errors import ModelError

ONE_BY_ONE = "set privacy.examples: one_by_one, which is exact but slower"

HOOKS = f"It would see the gradients of all examples at once. Do its work in the loss, or {ONE_BY_ONE}."
INNER = f"Gradients inside training_step are not supported when examples run together: {ONE_BY_ONE}."
_CHECKPOINTING = (
    "Activation checkpointing runs its function again after the step, when the tensors of single examples are gone. "
    "Turn it off and lower privacy.max_physical_batch_size, which also bounds the memory, or "
    f"{ONE_BY_ONE}."
)

REFUSED: dict[Any, str] = {
    torch.Tensor.register_hook: f"Tensor.register_hook: {HOOKS}",
    torch.Tensor.register_post_accumulate_grad_hook: f"Tensor.register_post_accumulate_grad_hook: {HOOKS}",
    torch.Tensor.retain_grad: f"Tensor.retain_grad: {HOOKS}",
    torch.Tensor.grad_fn.__get__: f"Tensor.grad_fn, as backward hooks do: {HOOKS}",  # type: ignore[union-attr]
    torch.Tensor.backward: f"Tensor.backward: {INNER}",
    torch.autograd.grad: f"torch.autograd.grad: {INNER}",
}
"""Functions that a step may not call, each with the reason and the cure."""

HOST_DRAW = (
    "One number would serve all examples of a physical batch. Draw with torch's own generator, such as torch.rand(()), "
    f"or {ONE_BY_ONE}."
)
SHARED_DRAW = (
    "Random numbers are drawn into a tensor that is the same for all examples. Draw with torch.rand_like(x), "
    f"torch.randn(shape) or torch.bernoulli(p), which give each example its own, or {ONE_BY_ONE}."
)
SHARED_WRITE = (
    "The numbers of an example are written into a tensor that all examples share. Write them into a tensor that is "
    "made in training_step, such as x.new_zeros(shape) or torch.zeros_like(x), and not into a view of one; or "
    f"{ONE_BY_ONE}. There is no rewrite for a buffer that keeps examples."
)
SAVED_TENSOR_HOOKS = f"Hooks on saved tensors see all examples at once. {_CHECKPOINTING}"
_MASK = (
    "transformers reads the attention mask of an example, to leave it out where it masks nothing. Give the model a "
    f"mask of four dimensions, attention_mask[:, None, None, :].bool(), which is applied as it is, or {ONE_BY_ONE}."
)
BATCH_NORM = (
    "BatchNorm in training mode writes statistics of the examples into its buffers, and mixes examples. Set "
    "privacy.batch_norm, or batch_norm of PrivacyCallback: group replaces it by GroupNorm, and freeze keeps it in "
    "evaluation mode with pretrained statistics. Without Lightning, call batch_norm_to_group_norm(model) or "
    "freeze_batch_norm(model) of dp_lightning.models."
)
_OF_BATCH_NORM = re.compile(r"running_(mean|var)\b|more than 1 value per channel when training")

# A pattern of torch's message, its reason, and what to do. The first match is used.
_REASONS: list[tuple[str, str, str]] = [
    (
        r"data-dependent control flow|calling \.item\(\)|Tensor\.__contains__",
        "The numbers of an example are read (if, float(), int(), .item(), assert)",
        "Write torch.where(condition, a, b) instead of `if`, and keep numbers in tensors",
    ),
    (
        r"boolean mask|dynamic shape|masked_select|nonzero|unique|repeat_interleave",
        "The shape of a result depends on the numbers of the example, as in x[mask]",
        "Multiply by the mask: (x * mask).sum() / mask.sum() instead of x[mask].mean(), and x.masked_fill(mask, "
        "value) or torch.where instead of an assignment",
    ),
    (
        r"doesn't have storage|Cannot access (data pointer|storage)|accessing `data`|detach views in-place|is_pinned",
        "The memory of a tensor is read (.numpy(), .tolist(), .data, copy.deepcopy, torch.tensor(x))",
        "Use torch functions, and x.detach() instead of x.data or torch.tensor(x)",
    ),
    (
        r"setup_context|does not have vmap support|generate_vmap_rule",
        "An autograd function has no rule for single examples",
        "Split its forward into forward and setup_context, and set generate_vmap_rule = True in the class",
    ),
]
_OF_VMAP = re.compile("vmap|functorch|[Bb]atching rule|BatchedTensor|randomness")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_INSTALLED = str(Path(torch.__file__).parents[1]) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep


def explained(error: Exception) -> Exception:
    """What a user can act on, if the error comes from running under vmap; other errors are returned as they are."""
    frames = traceback.extract_tb(error.__traceback__)
    files = {frame.filename for frame in frames}
    where, text = _place(frames), str(error)
    if any(name.endswith("torch/utils/checkpoint.py") for name in files):
        return ModelError(f"{where}{_CHECKPOINTING}")
    if any(name.endswith("torch/utils/hooks.py") for name in files):
        return ModelError(f"{where}A module has a backward hook. {HOOKS}")
    if isinstance(error, ModelError) or text == SAVED_TENSOR_HOOKS:
        return ModelError(f"{where}{text}")
    if is_of_batch_norm(text):
        return ModelError(f"{where}{BATCH_NORM}")
    if any(name.endswith("transformers/masking_utils.py") for name in files) and _OF_VMAP.search(text):
        return ModelError(f"{where}{_MASK}")
    for pattern, why, rewrite in _REASONS:
        if re.search(pattern, text):
            return ModelError(f"{where}{why}. {rewrite}, or {ONE_BY_ONE}.")
    if _OF_VMAP.search(text):
        return ModelError(f"{where}torch.func.vmap cannot run this ({text}). Rewrite it, or {ONE_BY_ONE}.")
    return error


def is_of_batch_norm(text: str) -> bool:
    """Whether torch's message, or the path of a buffer, comes from a BatchNorm in training mode."""
    return _OF_BATCH_NORM.search(text) is not None


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """File and line of the user's code, and of the library that it calls where that is not torch."""
    others = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
    users = [frame for frame in others if not frame.filename.startswith(_INSTALLED)]
    shown = [*users[-1:], *others[-1:]]
    named = dict.fromkeys(f"{frame.filename.removeprefix(_INSTALLED)}:{frame.lineno} ({frame.line})" for frame in shown)
    return ", in ".join(named) + ": " if named else ""
