"""The two modes in which a loss sees one example at a time and each example's contribution is collected.

``together``: all examples of a physical batch at once, under vmap. Code that is mapped cannot reach another example.
``one_by_one``: ordinary autograd on one example after the other, exact for every model whose loss is a function of its
example, and slower. Plain Python can keep things from one to the next, so what is reachable from the module is compared
after each. Each logical step begins with a synthetic example, whose loss moves buffers on and gives no gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dp_lightning.errors import DataError, ModelError
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.contribution import PerExample
from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import BATCH_NORM, HOST_DRAW, is_of_batch_norm
from dp_lightning.privacy.isolation.between_examples import Isolation
from dp_lightning.privacy.isolation.reachable import is_atom, reachable
from dp_lightning.privacy.phases import Phases
from dp_lightning.privacy.randomness import NoHostDraws, TrainingRandomness, only_given_keys
from dp_lightning.privacy.reading import Entries, ExampleBatch, flatten, unflatten
from dp_lightning.processors import sent
from dp_lightning.refusing import refuse_every_use

MODES = ("together", "one_by_one")

Loss = Callable[[Any], Tensor]
"""From a batch of one example to its loss, a scalar."""


class Examples(ABC):
    """One of the two modes.

    Args:
        parameters: the trained ones by name.
        phases: which of them are frozen in a step.
        isolation: what the module keeps from step to step.
        randomness: gives the global generators new keys.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], phases: Phases, isolation: Isolation, randomness: TrainingRandomness
    ) -> None:
        self._parameters, self._phases = parameters, phases
        self.isolation, self._randomness = isolation, randomness
        #: How the gradients of each parameter were taken in the last physical batch.
        self.methods: dict[str, str] = {}

    @abstractmethod
    def add(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        """Add the clipped gradients of the examples in ``batch``."""


class Together(Examples):
    """All examples of a physical batch under vmap."""

    def add(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        leaves, structure = flatten(batch.examples)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            raise DataError(
                "The batches of the training set have no tensor. With privacy.examples: together all examples run at "
                "once, and only tensors can differ between them. Let the data set or collate_fn return tensors, or set "
                "privacy.examples: one_by_one."
            )
        total.begin(len(batch), None if batch.counted.all() else sent(batch.counted, total.flat.device))
        recording = Recording(self._parameters, len(batch), total.take, stale=self.isolation.stale())

        def one(*tensors: Tensor) -> Tensor:
            mine: list[Any] = [Placeholder() if isinstance(leaf, Entries) else leaf for leaf in leaves]
            for place, tensor in zip(places, tensors, strict=True):
                mine[place] = tensor
            return _scalar(loss(unflatten(mine, structure)))

        self._randomness.before_step(batch.place)
        draws = NoHostDraws()
        draws.note()
        with self.isolation.together(recording), self._phases.held(batch.place.step), only_given_keys():
            recording.backward(recording.run(one, *(leaves[place] for place in places)))
        if drawn := draws.drawn():
            raise ModelError(f"training_step draws from {' and '.join(drawn)}. {HOST_DRAW}")
        total.end()
        self.methods = recording.methods


class OneByOne(Examples):
    """Ordinary autograd on one example after the other."""

    def add(self, loss: Loss, batch: ExampleBatch, total: ClippedSum) -> None:
        self.methods = dict.fromkeys(self._parameters, "one by one")
        leaves, structure = flatten(batch.examples)
        for parameter in self._parameters.values():
            parameter.grad = None  # an earlier step's
        watch = self.isolation.watch()
        for index, counted in enumerate(batch.counted.tolist()):
            # In memory of its own: a view leads to the others, and so does an object that several share.
            mine = [
                leaf[index].clone() if isinstance(leaf, Tensor) else self.isolation.copied(leaf[index])
                for leaf in leaves
            ]
            if not counted:  # synthetic, and what is no tensor is another example's
                mine = [leaf if isinstance(leaf, Tensor) else Placeholder() for leaf in mine]
            example = unflatten(mine, structure)
            for leaf in mine:
                watch.note(_tensors_in(leaf))
            self._randomness.before_step(batch.place, index)
            with self.isolation.one_by_one(watch, public=not counted), watch, self._phases.held(batch.place.step):
                try:
                    value = _scalar(loss(example))
                except ValueError as error:
                    if is_of_batch_norm(str(error)):
                        raise ModelError(BATCH_NORM) from error
                    raise
                gradients = self._gradients(value) if counted else {}
                del value
            if counted:
                parts = {name: gradient.unsqueeze(0) for name, gradient in gradients.items()}
                total.begin(1)
                total.take(PerExample(parts, "one by one"))
                total.end()

    def _gradients(self, value: Tensor) -> dict[str, Tensor]:
        if not value.requires_grad:
            _refuse_unconnected()
        self.isolation.require_own_leaves(value)
        with torch.autocast(value.device.type, enabled=False):
            value.backward()
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                found[name] = gradient.to_dense() if gradient.is_sparse else gradient
        return found


def _tensors_in(leaf: Any) -> list[Tensor]:
    """Of an example: the leaf, or what an object of some other class leads to."""
    if is_atom(leaf):
        return []
    if isinstance(leaf, Tensor):
        return [leaf]
    return [value for _, value in reachable(leaf) if issubclass(type(value), Tensor)]  # type: ignore[misc]


class Placeholder:
    """Stands for an entry of a batch that is no tensor, which cannot differ between examples under vmap."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            "training_step uses an entry of its batch that is not a tensor, such as a name or a list of numbers. With "
            "privacy.examples: together all examples run at once, and only tensors can differ between them. Let the "
            "data set return a tensor, or set privacy.examples: one_by_one."
        )

    __getattr__ = __str__ = __repr__ = _refuse


refuse_every_use(Placeholder, Placeholder._refuse)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"training_step returned {type(loss).__name__} and no loss. It has to return the loss of every batch, so "
            "that every step of the plan is taken."
        )
    if loss.numel() != 1:
        raise ModelError(f"training_step returned a loss of shape {tuple(loss.shape)}. It has to be a single number.")
    return loss.reshape(())


def _refuse_unconnected() -> NoReturn:
    raise ModelError(
        "The loss does not depend on any trained parameter. Compute it from the model's output, outside of "
        "torch.no_grad()."
    )


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By name.

    Raises:
        ModelError: where there is none, and where a lazy layer has not made its own yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"'{name}' belongs to a lazy layer and has no shape yet. Run a batch of zeros through the model before "
                "training, or give the layer its size, as nn.Linear(in_features, out_features) does."
            )
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if names := [name for name, parameter in found.items() if parameter.is_complex()]:
        raise ModelError(
            f"{', '.join(names[:5])} is complex, and norms are taken of real parameters. Hold real and imaginary "
            "parts, and combine them in forward: torch.view_as_complex(self.weight), of shape (..., 2)."
        )
    if not found:
        raise ModelError("The model has no parameter that requires a gradient, so there is nothing to train.")
    return found


def require_same_trained(parameters: Mapping[str, nn.Parameter], trained: Collection[str]) -> None:
    """Refuse a parameter that was frozen or unfrozen since the run began.

    Args:
        parameters: all that the module had at the start, by name.
        trained: the names of those that were trained.

    Raises:
        ModelError: naming them.
    """
    changed = [name for name, parameter in parameters.items() if parameter.requires_grad is not (name in trained)]
    for names, what in (
        ([name for name in changed if name not in trained], "unfrozen"),
        ([name for name in changed if name in trained], "frozen"),
    ):
        if names:
            were = "were" if names[1:] else "was"
            raise ModelError(
                f"{', '.join(names[:5])} {were} {what} during the private run. Which parameters are trained is fixed "
                "when it begins: freeze others before the fit. To train some only later, set privacy.frozen_until."
            )
