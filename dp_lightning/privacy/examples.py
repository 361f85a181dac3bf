"""The two modes in which a loss sees one example at a time and each example's contribution is collected.

``together``: all examples of a physical batch at once, under vmap. Code that is mapped cannot reach another example.
``one_by_one``: ordinary autograd on one example after the other, exact for every model whose loss is a function of its
example, and slower. The code is trusted to keep nothing from one example to the next; buffers are put back. Each
logical step begins with a synthetic example, whose loss moves buffers and counters on and gives no gradient.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.contribution import PerExample
from dp_lightning.privacy.gradients.normalization import ContiguousBatchNorm
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import UNTRAINED, explaining
from dp_lightning.privacy.isolation import Isolation
from dp_lightning.privacy.phases import Phases
from dp_lightning.privacy.randomness import TrainingRandomness
from dp_lightning.privacy.reading import ExampleBatch, unflatten
from dp_lightning.processors import sent

Loss = Callable[[Any], Tensor]
"""From a batch of one example to its loss, a scalar."""


class Examples:
    """Collects the contributions of examples in one of the two modes.

    Args:
        mode: ``together`` or ``one_by_one``.
        parameters: the trained parameters by name.
        phases: which parameters are frozen in a step.
        isolation: the checks around the loss.
        randomness: gives all generators new keys.
    """

    def __init__(
        self,
        mode: str,
        parameters: Mapping[str, Tensor],
        phases: Phases,
        isolation: Isolation,
        randomness: TrainingRandomness,
    ) -> None:
        self._mode, self._parameters, self._phases = mode, parameters, phases
        self._isolation, self._randomness = isolation, randomness
        self._warned = False

    def add(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        """Add the clipped gradients of the examples in ``batch``; the first batch of a logical step begins the step."""
        together = self._mode == "together"
        if batch.place.piece == 0:
            self._isolation.begin(together=together)
        explains = explaining(lambda rows: self._error(loss, batch, rows), batch.seen, together=together)
        with self._phases.freezing(batch.place.step), explains:
            if together:
                self._add_together(loss, batch, total)
            else:
                self._add_one_by_one(loss, batch, total)

    def _add_together(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        leaves, structure = batch.leaves, batch.structure
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        total.begin(len(batch), None if batch.counted.all() else sent(batch.counted, total.flat.device))
        recording = Recording(self._parameters, len(batch), total.take, stale=self._isolation.stale)

        def one(*tensors: Tensor) -> Tensor:
            mine: list[Any] = [leaf if isinstance(leaf, Tensor) else Placeholder() for leaf in leaves]
            for place, tensor in zip(places, tensors, strict=True):
                mine[place] = tensor
            return _scalar(loss(unflatten(mine, structure)))

        self._randomness.before_step(batch.place)
        with self._isolation.together(recording):
            recording.backward(recording.run(one, *(leaves[place] for place in places)))
        total.end()

    def _add_one_by_one(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        for index, counted in enumerate(batch.counted.tolist()):
            mine = [_alone(leaf, index, counted=counted) for leaf in batch.leaves]
            self._randomness.before_step(batch.place, index)
            with self._isolation.one_by_one(advances=not counted):
                if not counted:
                    self._advance(loss, unflatten(mine, batch.structure))
                    continue
                gradients = self._gradients(loss, unflatten(mine, batch.structure))
            total.begin(1)
            total.take(PerExample(gradients))
            total.end()

    def _advance(self, loss: Loss, synthetic: Any) -> None:
        """Run the loss of a synthetic example for the state that it advances; the loss may fail on zeros and ones."""
        try:
            with torch.no_grad():
                loss(synthetic)
        except Exception as error:  # the user's code may raise anything
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"The loss of a synthetic example fails ({type(error).__name__}: {error}). Buffers and counters "
                    "that training_step moves on stay as they are, since no real example may move them.",
                    stacklevel=2,
                )

    def _error(self, loss: Loss, batch: ExampleBatch, rows: int) -> Exception | None:
        """The error outside of vmap of the first example, or of the first and the last in one batch."""
        before = [(each, each.detach().clone(), each.grad) for each in self._parameters.values()]
        for each, *_ in before:
            each.grad = None
        self._isolation.begin(together=False)
        try:
            own = [x[[0, -1]].flatten(0, 1) if rows > 1 and isinstance(x, Tensor) else x[0] for x in batch.leaves]
            with self._isolation.one_by_one(advances=False):
                self._gradients(loss, unflatten(own, batch.structure))
        except Exception as error:  # the user's code may raise anything
            return error
        finally:
            for each, value, gradient in before:
                each.data.copy_(value)
                each.grad = gradient
        return None

    def _gradients(self, loss: Loss, example: Any) -> dict[str, Tensor]:
        """Gradients (1, *shape) by parameter name, without the parameters that the loss does not use."""
        with ContiguousBatchNorm():
            value = _scalar(loss(example))
        if not value.requires_grad:
            raise ModelError(UNTRAINED)
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        with torch.autocast(value.device.type, enabled=False):
            found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        return {
            name: (gradient.to_dense() if gradient.is_sparse else gradient).unsqueeze(0)
            for name, gradient in zip(trained, found, strict=True)
            if gradient is not None
        }


def _alone(leaf: Any, index: int, *, counted: bool) -> Any:
    """One example's part of a leaf, in memory of its own: a view, or a shared object, would lead to other examples.

    An entry that is no tensor has no synthetic value, and is None where the example does not count.
    """
    if isinstance(leaf, Tensor):
        return leaf[index].clone()
    return copy.deepcopy(leaf[index]) if counted else None


class Placeholder:
    """Stands for an entry of a batch that is no tensor, which cannot differ between examples under vmap."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "training_step uses an entry of its batch that is not a tensor, such as a name or a list of numbers. With "
            "privacy.examples: together all examples run at once, and only tensors can differ between them. Let the "
            "data set return a tensor, or set privacy.examples: one_by_one."
        )

    __getattr__ = __str__ = __repr__ = __format__ = __bool__ = __hash__ = _refuse
    __eq__ = __ne__ = __iter__ = __len__ = __getitem__ = __contains__ = __int__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __index__ = _refuse


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"training_step returned {type(loss).__name__} and no loss. It has to return the loss of every batch, so "
            "that every step of the plan is taken."
        )
    if loss.numel() != 1:
        raise ModelError(f"training_step returned a loss of shape {tuple(loss.shape)}. It has to be a single number.")
    return loss.reshape(())
