"""Checks that the loss of a batch is the mean, or the sum, of one loss for each example."""

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_lightning.errors import ModelError

# Two examples through different batch sizes agree to float32 rounding, which deep networks amplify to about 1e-4.
TOLERANCE = 1e-3
# The same batch goes through the same operations: it may differ by what a device does not repeat bit for bit.
_AGAIN = 1e-5
_MIXING = (
    "something in training_step mixes examples, such as batch statistics, class-weighted or masked means, hard example "
    "mining, mixup, or a loss that compares examples. Each example's loss must be its own."
)


class Division(NamedTuple):
    """A batch and the same rows in parts.

    Attributes:
        whole: the batch.
        parts: batches of its rows, in order.
        sizes: rows of each part.
    """

    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]


def check_losses(
    loss_of: Callable[[Any], Tensor],
    first: Division,
    others: Sequence[Division],
    *,
    loss_reduction: str,
    finite: bool,
) -> bool:
    """Compare losses of batches with those of their parts, and the first batch's with its own afterwards.

    Args:
        loss_of: batch to scalar loss, as training computes it.
        first: parts of one row each.
        others: tried in order until one shows something: ``loss_of`` takes it, and the losses are finite.
        loss_reduction: ``mean`` or ``sum``, how ``loss_of`` reduces.
        finite: whether the losses of the first have to be finite; otherwise nothing is shown where they are not.

    Returns:
        Whether one of the others has shown something.

    Raises:
        ModelError: naming what differs.
    """
    with refuse_randomness("training_step"):
        with _RefuseWeights():
            joint = scalar(loss_of(first.whole))
        again = scalar(loss_of(first.whole))
        singles = [scalar(loss_of(batch)) for batch in first.parts]
    if not finite and not all(math.isfinite(loss) for loss in (joint, again, *singles)):
        return False
    _compare_losses(joint, again, singles, loss_reduction)
    shown = any(_add_up(loss_of, division, loss_reduction) for division in others)
    if not close(joint, scalar(loss_of(first.whole)), _AGAIN):
        raise ModelError(
            "training_step gives another loss for the same batch after it has seen others: it keeps something of "
            "earlier batches, such as a moving average of the loss, so an example would enter later gradients. Its "
            "loss may depend on the batch and on nothing that changes between calls."
        )
    return shown


def _add_up(loss_of: Callable[[Any], Tensor], division: Division, loss_reduction: str) -> bool:
    """Whether the losses of the parts show something; raises where they do not give that of the whole."""
    try:
        with refuse_randomness("training_step"):
            whole, *parts = (scalar(loss_of(batch)) for batch in (division.whole, *division.parts))
    except ModelError:
        raise
    except Exception:
        return False  # of numbers that the module does not take, such as a label that no class has
    weights = [size / sum(division.sizes) if loss_reduction == "mean" else 1.0 for size in division.sizes]
    expected = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    if not math.isfinite(whole) or not math.isfinite(expected):
        return False
    if not close(whole, expected):
        raise ModelError(
            f"The loss of {sum(division.sizes)} examples together ({whole:.6g}) is not what the losses of "
            f"{' and '.join(map(str, division.sizes))} of them give ({expected:.6g}): {_MIXING}"
        )
    return True


@contextmanager
def refuse_randomness(what: str) -> Iterator[None]:
    """Refuse code that draws random numbers: what it does once need not be what it does in the next batch.

    Raises:
        ModelError: naming ``what``.
    """
    before = _random_states()
    yield
    if before != _random_states():
        raise ModelError(
            f"{what} draws random numbers, so it cannot be shown that examples never mix in it. Move random "
            "augmentation to the data set's transform, where it sees one example. Of dropout, nn.Dropout, DropPath and "
            "StochasticDepth are known; set that of attention and recurrent layers to 0."
        )


def _random_states() -> list[object]:
    """States of the generators of torch, numpy and Python."""
    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch_states = [state.tolist() for state in (torch.get_rng_state(), *cuda)]
    return [random.getstate(), kind, np.asarray(keys).tolist(), rest, torch_states]


class _RefuseWeights(TorchFunctionMode):
    """Refuses a mean over examples that each have a weight, or that leaves some out: it depends on the other labels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What has one row, or does not enter the gradient, mixes nothing.
        logits: Any = kwargs.get("input", args[0] if args else None)
        enters = torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad
        if func in (F.cross_entropy, F.nll_loss) and enters and logits.dim() > 1 and len(logits) > 1:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            weight = given.arguments["weight"]
            mean = given.arguments["reduction"] == "mean"
            for name, differs in (
                ("weight", weight is not None and not bool((weight == weight.flatten()[0]).all())),
                ("ignore_index", given.arguments["ignore_index"] != -100),
            ):
                if mean and differs:
                    raise ModelError(
                        f"training_step takes {func.__name__} with `{name}`: such a class-weighted or masked mean is "
                        "divided by what all labels of the batch add up to, so examples enter each other's gradients. "
                        "Take reduction='none', weigh each example's loss, and return the mean."
                    )
        return func(*args, **kwargs)


def _compare_losses(joint: float, again: float, singles: list[float], loss_reduction: str) -> None:
    if not all(math.isfinite(loss) for loss in (joint, again, *singles)):
        raise ModelError(
            "training_step gives a loss that is not finite for inputs and floating-point targets between 0 and 1, so "
            "it cannot be shown that examples do not mix. Start from parameters for which the loss is finite, and keep "
            "logarithms and divisions of targets finite (clamp)."
        )
    if not close(joint, again, _AGAIN):
        raise ModelError(
            "training_step gives another loss when it is called again on the same batch, so it cannot be shown that "
            "examples do not mix. Its loss may depend on the batch and on nothing that changes between calls."
        )
    mean, total = sum(singles) / len(singles), sum(singles)
    expected, other = (mean, total) if loss_reduction == "mean" else (total, mean)
    if close(joint, expected):
        return
    if close(joint, other):
        kind = "sum" if loss_reduction == "mean" else "mean"
        raise ModelError(
            f"The loss is the {kind} of the examples' losses, but privacy.loss_reduction is '{loss_reduction}'. Set "
            f"privacy.loss_reduction to '{kind}'."
        )
    raise ModelError(
        f"The loss of {len(singles)} examples together ({joint:.6g}) is not the {loss_reduction} of their losses alone "
        f"({mean if loss_reduction == 'mean' else total:.6g}): {_MIXING}"
    )


def scalar(loss: Any) -> float:
    """The loss as a number.

    Raises:
        ModelError: it is no scalar.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ModelError("training_step must return the loss as a scalar tensor (or a dict with it under 'loss').")
    return float(loss.detach())


def close(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two losses agree, relative to the larger."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6)
