"""Tries on the model itself, with some examples, that one's loss and gradient do not depend on the others.

The batch's loss must be the mean (or sum) of the losses of its parts, the per-example gradients of the batch must equal
ordinary gradients of each example alone, for every parameter by itself, no buffer or parameter may change, no earlier
batch may matter, and nothing but dropout may draw random numbers. A trial is no proof: a module that mixes examples
under conditions that the trial does not meet passes it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_lightning.errors import ModelError
from dp_lightning.privacy.checks.gradients import IN_FLOAT32, IN_FLOAT32_ALONE, IN_FLOAT64, check_gradients
from dp_lightning.privacy.checks.losses import Division, check_losses
from dp_lightning.privacy.gradients.engine import GradientEngine


def check_per_example(
    model: nn.Module,
    engine: GradientEngine,
    loss_of: Callable[[Any], Tensor],
    first: Division,
    others: Sequence[Division],
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
        first: a batch for the losses, with parts of one row each.
        others: further batches with their parts, of which one is enough: the first that shows something.
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

        def losses(others: Sequence[Division], *, finite: bool) -> bool:
            check = partial(check_losses, loss_of, loss_reduction=loss_reduction)
            try:
                return check(first, others, finite=finite)
            except ModelError as error:
                if not _has_float64(model):
                    raise
                with _in_float64(model):
                    try:
                        return check(_float64(first), _float64(others), finite=True)
                    except Exception:
                        raise error from None

        # A head of zeros gives all examples one loss, and any weighted mean of equal numbers is the mean.
        with _moved(model):
            shown = losses(others, finite=False)
        losses(() if shown else others, finite=True)
        # In two orders: a module that sorts its examples may find one of them sorted.
        for batch, singles in few:
            compare = partial(check_gradients, engine, loss_of, augmult=augmult, loss_reduction=loss_reduction)
            mismatch: ModelError | None = None
            try:
                compare(batch, singles, gap=IN_FLOAT32)
            except ModelError as found:
                mismatch = found  # it may be rounding, which puts a few units on the other side of a ReLU's kink
            if _has_float64(model):
                with _in_float64(model):
                    try:
                        compare(_float64(batch), _float64(singles), gap=IN_FLOAT64)
                        continue
                    except ModelError as found:
                        raise mismatch or found from None
                    except Exception:
                        pass  # a model that casts its inputs itself
            if mismatch is not None:
                compare(batch, singles, gap=IN_FLOAT32_ALONE)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout is independent noise per example; it is off during the check so that losses can be compared."""
    dropping = [
        module
        for module in model.modules()
        if module.training
        and (
            isinstance(module, nn.modules.dropout._DropoutNd)
            or type(module).__name__ in ("DropPath", "StochasticDepth")
        )
    ]
    for module in dropping:
        module.eval()
    try:
        yield
    finally:
        for module in dropping:
            module.train()


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Trained parameters moved at random, each by about the length that a fresh weight has, and back bit for bit."""
    kept = [(p, p.data) for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    for parameter, value in kept:
        inputs = value[0].numel() if value.dim() > 1 else 4
        step = torch.randn(value.shape, generator=generator, dtype=torch.float32) * (2 * inputs**-0.5)
        parameter.data = value + step.to(value)
    try:
        yield
    finally:
        for parameter, value in kept:
            parameter.data = value


def _has_float64(model: nn.Module) -> bool:
    return all(parameter.device.type != "mps" for parameter in model.parameters())


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
            if name in before and not _equal(tensor, before[name]):
                changed.append(name)
                tensor.copy_(before[name])
    if changed:
        raise ModelError(
            f"The forward pass changes '{changed[0]}'. A buffer or parameter computed from raw examples would be saved "
            "with the model, outside of the guarantee. Use a layer without running statistics (and no max_norm)."
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    yield from model.named_parameters()


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})
