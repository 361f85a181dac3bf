"""Checks that one example's loss and gradient do not depend on the other examples of a batch.

Known offenders are refused by type before the data is touched. What types cannot show is tried on the model itself
with some examples: the batch's loss must be the mean (or sum) of the losses of its parts, the per-example gradients of
the batch must equal ordinary gradients of each example alone, for every parameter by itself, no buffer or parameter may
change, no earlier batch may matter, and nothing but dropout may draw random numbers. A trial is no proof: a module that
mixes examples under conditions that the trial does not meet passes it.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.gradients.engine import GradientEngine
from dp_lightning.privacy.gradients.workspace import Workspace

# Two examples through different batch sizes agree to float32 rounding, which deep networks amplify to about 1e-4.
_TOLERANCE = 1e-3
# The same batch goes through the same operations: it may differ by what a device does not repeat bit for bit.
_AGAIN = 1e-5


class _Gap(NamedTuple):
    """How far two gradients of a parameter may be apart: in parts of its own length, and of the whole gradient's."""

    own: float
    whole: float


_IN_FLOAT32, _IN_FLOAT64 = _Gap(1e-3, 1e-5), _Gap(1e-4, 1e-8)
# For a model that cannot run in float64: deep networks amplify the rounding of float32.
_IN_FLOAT32_ALONE = _Gap(0.0, _TOLERANCE)


class Division(NamedTuple):
    """A batch and the same rows in parts."""

    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]


def refuse_mixing_modules(model: nn.Module) -> None:
    """Refuse layers that are known to mix examples, and compiled modules.

    Raises:
        ModelError: with the module's name and the fix.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ModelError(
                f"Module '{name}' is compiled: compiled code does not show what its layers see, so no "
                "per-example gradient can be taken. Train the module without torch.compile."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            if module.track_running_stats:
                raise ModelError(
                    f"Module '{name}' ({type(module).__name__}) cannot be trained privately: its running statistics "
                    "are computed from raw examples. Set track_running_stats=False."
                )
            continue
        refuse_batch_statistics(name, module)


def refuse_batch_statistics(name: str, module: nn.Module) -> None:
    """Refuse a BatchNorm that normalises by the batch it sees.

    Raises:
        ModelError: with the module's name and the fix.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not _is_fixed(module):
        raise ModelError(
            f"Module '{name}' ({type(module).__name__}) cannot be trained privately: it computes statistics "
            "over the batch, so examples enter each other's gradients. Make it a GroupNorm (TimmModule: "
            "batch_norm: group_norm; any model: dp_lightning.models.batch_norm_to_group_norm), or keep it in "
            "evaluation mode with statistics of public data (batch_norm: frozen; freeze_batch_norm)."
        )


def fixed_statistics(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in evaluation mode, whose statistics have to be public."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_fixed(module)
    ]


def _is_fixed(norm: nn.modules.batchnorm._NormBase) -> bool:
    """Whether the layer is the same scale and shift for every example."""
    return not norm.training and norm.running_mean is not None


def check_per_example(
    model: nn.Module,
    engine: GradientEngine,
    loss_of: Callable[[Any], Tensor],
    divisions: Sequence[Division],
    *,
    few: Sequence[tuple[Any, Sequence[Any]]],
    augmult: int,
    loss_reduction: str,
) -> None:
    """Try the model on some examples, together and apart.

    Args:
        model: the model in training mode; left as it was.
        engine: the gradient engine attached to it.
        loss_of: batch to scalar loss, as training computes it.
        divisions: batches for the losses, with their parts. The first one's parts have one row each. Where a later one
            has a loss that is not finite, it shows nothing.
        few: for the gradients, which take more memory than losses: batches of fewer examples, of ``augmult`` rows
            each, and for each of them the batches of its examples alone, in the same order.
        augmult: rows of an example in ``few``.
        loss_reduction: ``mean`` or ``sum``, how ``loss_of`` reduces.

    Raises:
        ModelError: naming what differs.
    """
    with (
        _without_dropout(model),
        _kept_state(model),
        torch.enable_grad(),
        torch.random.fork_rng(devices=_cuda_devices(model)),
    ):
        try:
            _check_losses(loss_of, divisions, loss_reduction)
        except ModelError as error:
            with _in_float64(model):
                try:
                    _check_losses(loss_of, [_float64(division) for division in divisions], loss_reduction)
                except Exception:
                    raise error from None
        # In two orders: a module that sorts its examples may find one of them sorted.
        for batch, singles in few:
            compare = partial(_check_gradients, engine, loss_of, augmult=augmult, loss_reduction=loss_reduction)
            mismatch: ModelError | None = None
            try:
                compare(batch, singles, gap=_IN_FLOAT32)
            except ModelError as found:
                mismatch = found  # it may be rounding, which puts a few units on the other side of a ReLU's kink
            with _in_float64(model):
                try:
                    compare(_float64(batch), _float64(singles), gap=_IN_FLOAT64)
                    continue
                except ModelError as found:
                    raise mismatch or found from None
                except Exception:
                    pass  # a model that casts its inputs itself
            if mismatch is not None:
                compare(batch, singles, gap=_IN_FLOAT32_ALONE)


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
            "augmentation to the data set's transform, where it sees one example."
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
        if func in (F.cross_entropy, F.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            for name, given in (
                ("weight", weight is not None and not bool((weight == weight.flatten()[0]).all())),
                ("ignore_index", kwargs.get("ignore_index", -100) != -100),
            ):
                if given:
                    raise ModelError(
                        f"training_step takes {func.__name__} with `{name}`: such a class-weighted or masked mean is "
                        "divided by what all labels of the batch add up to, so examples enter each other's gradients. "
                        "Take reduction='none', weigh each example's loss, and return the mean."
                    )
        return func(*args, **kwargs)


def _check_losses(loss_of: Callable[[Any], Tensor], divisions: Sequence[Division], loss_reduction: str) -> None:
    (together, alone, _), *others = divisions
    with refuse_randomness("training_step"):
        with _RefuseWeights():
            joint = _scalar(loss_of(together))
        again = _scalar(loss_of(together))
        singles = [_scalar(loss_of(batch)) for batch in alone]
    _compare_losses(joint, again, singles, loss_reduction)
    for division in others:
        with refuse_randomness("training_step"):
            whole, *parts = (_scalar(loss_of(batch)) for batch in (division.whole, *division.parts))
        expected = sum(part * size for part, size in zip(parts, division.sizes, strict=True))
        if loss_reduction == "mean":
            expected /= sum(division.sizes)
        else:
            expected = sum(parts)
        if math.isfinite(whole) and math.isfinite(expected) and not _close(whole, expected):
            raise ModelError(
                f"The loss of {sum(division.sizes)} examples together ({whole:.6g}) is not what the losses of "
                f"{' and '.join(map(str, division.sizes))} of them give ({expected:.6g}): {_MIXING}"
            )
    if not _close(joint, _scalar(loss_of(together)), _AGAIN):
        raise ModelError(
            "training_step gives another loss for the same batch after it has seen others: it keeps something of "
            "earlier batches, such as a moving average of the loss, so an example would enter later gradients. Its "
            "loss may depend on the batch and on nothing that changes between calls."
        )


_MIXING = (
    "something in training_step mixes examples, such as batch statistics, class-weighted or masked means, hard example "
    "mining, mixup, or a loss that compares examples. Each example's loss must be its own."
)


def _compare_losses(joint: float, again: float, singles: list[float], loss_reduction: str) -> None:
    if not all(math.isfinite(loss) for loss in (joint, again, *singles)):
        raise ModelError(
            "training_step gives a loss that is not finite for inputs between 0 and 1, so it cannot be shown that "
            "examples do not mix. Start from parameters for which the loss is finite."
        )
    if not _close(joint, again, _AGAIN):
        raise ModelError(
            "training_step gives another loss when it is called again on the same batch, so it cannot be shown that "
            "examples do not mix. Its loss may depend on the batch and on nothing that changes between calls."
        )
    mean, total = sum(singles) / len(singles), sum(singles)
    expected, other = (mean, total) if loss_reduction == "mean" else (total, mean)
    if _close(joint, expected):
        return
    if _close(joint, other):
        kind = "sum" if loss_reduction == "mean" else "mean"
        raise ModelError(
            f"The loss is the {kind} of the examples' losses, but privacy.loss_reduction is '{loss_reduction}'. Set "
            f"privacy.loss_reduction to '{kind}'."
        )
    raise ModelError(
        f"The loss of {len(singles)} examples together ({joint:.6g}) is not the {loss_reduction} of their losses alone "
        f"({mean if loss_reduction == 'mean' else total:.6g}): {_MIXING}"
    )


def _check_gradients(
    engine: GradientEngine,
    loss_of: Callable[[Any], Tensor],
    together: Any,
    alone: Sequence[Any],
    *,
    augmult: int,
    loss_reduction: str,
    gap: _Gap,
) -> None:
    b = len(alone)
    with torch.enable_grad():
        contributions: list[Contribution] = []
        workspace = Workspace()

        def keep(contribution: Contribution) -> None:
            contribution.measure(workspace)
            contributions.append(contribution)

        with engine.record(b, keep, augmult=augmult):
            loss = loss_of(together)
            engine.scale(loss, b if loss_reduction == "mean" else 1)
            loss.backward()
        for index, batch in enumerate(alone):
            names = list(engine.parameters)
            expected = torch.autograd.grad(
                loss_of(batch), [engine.parameters[name] for name in names], allow_unused=True
            )
            row = torch.zeros(b, device=loss.device)
            row[index] = 1.0
            ours = {}
            for contribution in contributions:
                ours.update(contribution.weighted_sum(dict.fromkeys(contribution.names, row)))
            _compare(names, expected, ours, gap)


def _compare(names: list[str], expected: Sequence[Tensor | None], ours: dict[str, Tensor], gap: _Gap) -> None:
    scale = sum(float(g.double().square().sum()) for g in expected if g is not None) ** 0.5
    for name, gradient in zip(names, expected, strict=True):
        mine = ours.get(name)
        if gradient is None and mine is None:
            continue
        reference = torch.zeros_like(mine) if gradient is None and mine is not None else gradient
        found = torch.zeros_like(reference) if mine is None and reference is not None else mine
        assert reference is not None
        assert found is not None
        difference = float((reference.double() - found.double()).norm())
        length = float(reference.double().norm())
        # Without a contribution there would be noise and no gradient, however small the gradient is.
        allowed = min(gap, _IN_FLOAT32, key=lambda each: each.whole) if mine is None else gap
        if not difference <= allowed.own * length + allowed.whole * max(scale, 1e-12):
            raise ModelError(
                f"The per-example gradient of parameter '{name}' differs from the gradient of the example alone (by "
                f"{difference:.3g}, where its gradient is {length:.3g} and the whole one {scale:.3g} long). Either "
                "examples mix in a layer, or the parameter is used outside of its own module's forward, such as "
                "F.linear(x, other.weight) or a penalty on the weights in the loss. Call the module itself; give a "
                "penalty to the optimizer as weight_decay; or freeze the parameter (requires_grad=False)."
            )


def _scalar(loss: Any) -> float:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ModelError("training_step must return the loss as a scalar tensor (or a dict with it under 'loss').")
    return float(loss.detach())


def _close(a: float, b: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-6)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout is independent noise per example; it is off during the check so that losses can be compared."""
    dropping = [
        module
        for module in model.modules()
        if module.training
        and (isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "DropPath")
    ]
    for module in dropping:
        module.eval()
    try:
        yield
    finally:
        for module in dropping:
            module.train()


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Floating-point parameters and buffers in float64, and back bit for bit."""
    kept = [(tensor, tensor.data) for _, tensor in _state(model) if tensor.dtype == torch.float32]
    for tensor, single in kept:
        tensor.data = single.double()
    try:
        yield
    finally:
        for tensor, single in kept:
            tensor.data = single


def _float64(batch: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


@contextmanager
def _kept_state(model: nn.Module) -> Iterator[None]:
    """Put buffers and parameters back, and refuse a model that changes them from raw examples."""
    before = {name: tensor.detach().clone() for name, tensor in _state(model)}
    yield
    changed = []
    with torch.no_grad():
        for name, tensor in _state(model):
            if name in before and not torch.equal(tensor, before[name]):
                changed.append(name)
                tensor.copy_(before[name])
    if changed:
        raise ModelError(
            f"The forward pass changes '{changed[0]}'. A buffer or parameter computed from raw examples would be saved "
            "with the model, outside of the guarantee. Use a layer without running statistics (and no max_norm)."
        )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from model.named_parameters()


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})
