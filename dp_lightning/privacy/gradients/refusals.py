"""What a step under vmap cannot do: why, and what to write instead."""

import os
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dp_lightning.errors import DpLightningError, ModelError

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
    torch.Tensor.backward: "Tensor.backward, which adds to .grad. Return the loss, whose gradient the step takes.",
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
UNTRAINED = (
    "The loss does not depend on any trained parameter. Compute it from the model's output, outside of torch.no_grad()."
)
_ALONE = " The same code runs on two examples: let it take a single one."
BATCH_NORM = (
    "BatchNorm in training mode writes statistics of the examples into its buffers, and mixes examples. Set "
    "privacy.batch_norm, or batch_norm of PrivacyCallback: group replaces it by GroupNorm, and freeze keeps it in "
    "evaluation mode with pretrained statistics. Without Lightning, call batch_norm_to_group_norm(model) or "
    "freeze_batch_norm(model) of dp_lightning.models."
)
_STATISTICS = re.compile(r"running_(mean|var)\b")
# The code of layers that take statistics of a batch, which torch refuses for one value with "more than 1 value".
_BATCH_NORMS = "torch/nn/modules/batchnorm.py", "timm/layers/norm_act.py"

_OF_VMAP = re.compile("vmap|functorch|[Bb]atching rule|BatchedTensor|randomness")
_SHAPE = (
    "The shape of a result depends on the numbers of the example, as in x[mask]",
    "Multiply by the mask: (x * mask).sum() / mask.sum().clamp_min(1) instead of x[mask].mean(), and "
    "x.masked_fill(mask, value) or torch.where instead of an assignment",
)
_UNEQUAL = "stack expects each tensor to be equal size"
# A pattern of torch's message, the end of a file's name in the traceback, the reason, and what to do instead of taking
# the examples one by one. The first match is used.
_REASONS: list[tuple[str, str, str, str]] = [
    (
        _OF_VMAP.pattern,
        "transformers/masking_utils.py",
        "transformers reads the attention mask of an example, to leave it out where it masks nothing",
        "Give the model a mask of four dimensions, attention_mask[:, None, None, :].bool(), which is applied as it is",
    ),
    (
        "",
        "torchvision/transforms/v2/_augment.py",
        "MixUp and CutMix mix the examples of a batch, and a step sees a batch of one",
        "Leave them out: there is nothing to mix",
    ),
    (
        "",
        "torch/nn/utils/rnn.py",
        "The lengths of packed sequences decide how a step goes on, and they differ between examples",
        "Give the network the padded sequences, and take the output at lengths - 1 with output.gather",
    ),
    (
        "",
        "torch/nn/modules/rnn.py",
        "LSTM cells, packed sequences and projections (proj_size) have no rule for single examples",
        "Use nn.LSTM, nn.GRU or nn.RNN without proj_size, on padded sequences",
    ),
    (
        r"data-dependent control flow|calling \.item\(\)|Tensor\.__contains__",
        "",
        "The numbers of an example are read (if, float(), int(), .item(), assert)",
        "Write torch.where(condition, a, b) instead of `if`, and keep numbers in tensors",
    ),
    ("positive num_classes", "", *_SHAPE[:1], "Give F.one_hot its num_classes"),
    (r"boolean mask|dynamic shape|masked_select|nonzero|unique|repeat_interleave|tensor_split|'Sparse", "", *_SHAPE),
    (
        r"doesn't have storage|Cannot access (data pointer|storage)|accessing `data`|detach views in-place|is_pinned",
        "",
        "The memory of a tensor is read (.numpy(), .tolist(), .data, copy.deepcopy, torch.tensor(x))",
        "Use torch functions, and x.detach() instead of x.data or torch.tensor(x)",
    ),
    (
        r"setup_context|does not have vmap support|generate_vmap_rule",
        "",
        "An autograd function has no rule for single examples",
        "Split its forward into forward and setup_context, and set generate_vmap_rule = True in the class",
    ),
]
_TORCH = str(Path(torch.__file__).parent) + os.sep
_INSTALLED = str(Path(torch.__file__).parents[1]) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep


@contextmanager
def explaining(fails: Callable[[int], Exception | None], seen: Callable[[], str], *, together: bool) -> Iterator[None]:
    """Context in which an error of the step becomes one that a user can act on, with the line of the user's code.

    Args:
        fails: the error of the step on a batch of one example, or of two, outside of vmap; it is called after an error.
        seen: what the step sees, in words.
        together: whether the step runs under vmap.

    Raises:
        ModelError: for every error but those of memory, of settings and of this package, which stay as they are.
    """
    try:
        yield
    except Exception as error:
        explanation = _explained(error, fails, seen, together)
        if explanation is error:
            raise
        raise explanation from error


def _explained(
    error: Exception, fails: Callable[[int], Exception | None], seen: Callable[[], str], together: bool
) -> Exception:
    frames = traceback.extract_tb(error.__traceback__)
    files = {frame.filename for frame in frames}
    where, text = _place(frames), str(error)
    if together and any(name.endswith("torch/utils/checkpoint.py") for name in files):
        return ModelError(f"{where}{_CHECKPOINTING}")
    if together and any(name.endswith("torch/utils/hooks.py") for name in files):
        return ModelError(f"{where}A module has a backward hook. {HOOKS}")
    if isinstance(error, ModelError) or text == SAVED_TENSOR_HOOKS:
        return ModelError(f"{where}{text}{_ALONE if text == UNTRAINED and not fails(2) else ''}")
    if isinstance(error, DpLightningError | MemoryError | torch.OutOfMemoryError):
        return error
    if is_of_batch_norm(text) or ("more than 1 value" in text and any(name.endswith(_BATCH_NORMS) for name in files)):
        return ModelError(f"{where}{BATCH_NORM}")
    alone = fails(1)
    offer = "" if alone else f", or {ONE_BY_ONE}"
    if together and isinstance(error, RuntimeError):  # as all of vmap's are
        for pattern, file, why, rewrite in _REASONS:
            if re.search(pattern, text) and any(name.endswith(file) for name in files):
                return ModelError(f"{where}{why}. {rewrite}{offer}.")
        if alone is None and _UNEQUAL in text:  # vmap has called a function for one example after the other
            return ModelError(f"{where}{'. '.join(_SHAPE)}{offer}.")
        if _OF_VMAP.search(text):
            short = textwrap.shorten(text, 400, placeholder=" ...")
            return ModelError(f"{where}torch.func.vmap cannot run this ({short}). Rewrite it{offer}.")
    if alone is not None:  # its text has the shapes of one example
        error, where = alone, _place(traceback.extract_tb(alone.__traceback__)) or where
    if not where and not frames[-1].filename.endswith("torch/autograd/graph.py"):
        return error  # a defect of this package
    what = ": ".join(filter(None, (type(error).__name__, str(error))))
    needs = _ALONE if alone and not fails(2) else ""
    return ModelError(f"{where or 'Backward pass: '}{what} (The step sees {seen()}.){needs}")


def is_of_batch_norm(text: str) -> bool:
    """Whether torch's message, or the path of a buffer, names the statistics of a BatchNorm in training mode."""
    return _STATISTICS.search(text) is not None


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """File and line of the user's code, and of the library that it calls where that is not torch."""
    others = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
    users = [frame for frame in others if not frame.filename.startswith(_INSTALLED)]
    shown = [*users[-1:], *others[-1:]]
    named = dict.fromkeys(f"{frame.filename.removeprefix(_INSTALLED)}:{frame.lineno} ({frame.line})" for frame in shown)
    return ", in ".join(named) + ": " if named else ""
