"""Records one physical batch while ``training_step`` runs under vmap, where it sees a single example.

Rules belong to functions. If a function with a rule is called with a trained parameter and the tensor of an example, it
runs once on the rows of all examples, with weights that require no gradient; its input is kept, and the gradient of its
output arrives for all examples at once. If a parameter is passed to any other function, a copy for each example
replaces it, and the gradients of the copies are those of the examples. What is computed from parameters alone is
computed once; gradients of the examples are pulled back through that computation. So no parameter gets an ordinary
gradient; if one does, that is an error.

Parameters are recognised by ``requires_grad``. Inside vmap, a tensor that differs between examples is wrapped; one that
is not wrapped and requires a gradient is a trained parameter or computed from trained parameters.
"""

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.contribution import Call, Contribution, PerExample
from dp_lightning.privacy.gradients.functions import DRAWN_IN_PLACE, PLAIN, collect, name_of, writes
from dp_lightning.privacy.gradients.provenance import Provenance, Stale
from dp_lightning.privacy.gradients.refusals import (
    HOOKS,
    INNER,
    ONE_BY_ONE,
    REFUSED,
    SAVED_TENSOR_HOOKS,
    SHARED_DRAW,
    SHARED_WRITE,
    UNTRAINED,
)
from dp_lightning.privacy.gradients.rewrites import REWRITES
from dp_lightning.privacy.gradients.rules import RULES, Rule
from dp_lightning.privacy.gradients.sources import Sources, started
from dp_lightning.torch_internals import (
    below_transforms,
    has_hooks,
    is_batched,
    level,
    tree_leaves,
    tree_map_only,
    unwrapped,
    version_of,
    wrapped,
)

Take = Callable[[Contribution], None]

_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Recording(TorchFunctionMode):
    """One physical batch.

    Use::

        recording = Recording(parameters, batch_size, take)
        losses = recording.run(step, examples)      # (b,)
        recording.backward(losses)                  # take gets a contribution for each parameter that was used

    Args:
        parameters: the trained parameters by name.
        batch_size: number of examples b.
        take: called with each contribution; no parameter is in two of them.
        stale: tensors of examples that were made in earlier physical batches and were alive at their end, by id; the
            step may not use them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batch_size: int,
        take: Take,
        *,
        stale: Stale | None = None,
    ) -> None:
        super().__init__()
        self._parameters, self._batch_size, self._take = parameters, batch_size, take
        self._sources = Sources(parameters, batch_size)
        self._provenance = Provenance(parameters, stale or {})
        #: The memory that the step has written to and not made: a tensor over all of it, and its value before.
        self.written = self._provenance.written
        #: Gives the tensors of examples that the step has made and that are still referenced.
        self.living = self._provenance.living
        self._level = 0
        self._failed: Any = None
        self._single: frozenset[str] = frozenset()

    def run(self, step: Callable[..., Tensor], *examples: Any) -> Tensor:
        """The losses (b,) of ``step`` on each example.

        Args:
            step: maps one example's part of ``examples`` to its loss.
            examples: trees of tensors (b, ...).

        Raises:
            ModelError: for what a step may not do. What torch raises is made an error for users by ``explaining``.
        """

        def one(*example: Any) -> Tensor:
            self._level = level() or 0
            for leaf in tree_leaves(example):
                self._provenance.add_made(leaf)
            with self:
                loss = step(*example)
            if self._failed is not None:
                raise ModelError(
                    f"training_step catches an error of {name_of(self._failed)}. Any example of the batch may have "
                    "caused it, and all of them would take the other branch. Choose with torch.where, such as after "
                    f"torch.linalg.cholesky_ex, or {ONE_BY_ONE}."
                )
            self._provenance.require_of_this_batch(loss)
            if loss.requires_grad and not is_batched(loss):
                loss = self._sources.copies(loss, self._level)
            return loss

        self._require_no_hooks()
        with torch.autograd.graph.disable_saved_tensors_hooks(SAVED_TENSOR_HOOKS):
            losses: Tensor = torch.func.vmap(one, randomness="different")(*examples)
        return losses

    def backward(self, losses: Tensor) -> None:
        """Hand over what the examples contribute.

        Raises:
            ModelError: when the loss depends on no trained parameter, or a gradient reaches a parameter without passing
                through the recorded functions.
        """
        if not losses.requires_grad:
            raise ModelError(UNTRAINED)
        held = self._gradients()
        for name in held:
            self._parameters[name].grad = None
        self._single = self._sources.single()
        try:
            with torch.autocast(losses.device.type, enabled=False):
                losses.backward(torch.ones_like(losses))
                self._require_no_gradients()
                self._hand_over()
        finally:
            for name in self._gradients() | held:
                self._parameters[name].grad = held.get(name)

    # What the mode sees

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        at = level()
        if func in PLAIN or at is None or at < self._level:  # below: inside a function that was already seen
            return func(*args, **kwargs)
        if func in REFUSED:
            raise ModelError(f"training_step uses {REFUSED[func]}")
        tensors: list[Tensor] = []
        collect(args, tensors)
        if kwargs:
            collect(kwargs.values(), tensors)
        outermost, require = at == self._level, self._provenance.require_of_this_batch
        batched, sources = 0, []
        for tensor in tensors:
            require(tensor)
            if is_batched(tensor):
                batched += 1
            elif tensor.requires_grad:
                sources.append(tensor)
        if sources and not torch.is_grad_enabled():
            sources = []
        if sources and not outermost:
            raise ModelError(f"training_step uses a transform of torch.func on a tensor that needs a gradient. {INNER}")
        if (batched or func in DRAWN_IN_PLACE) and writes(func):
            batched += self._becomes_batched(func, args[0])
        if "out" in kwargs or writes(func):
            self._provenance.before(func, args, kwargs)
        if batched and func == _REQUIRES_GRAD:  # autograd runs below the vmap
            return unwrapped(args[0]).requires_grad
        if batched:
            try:
                result = self._with_examples(func, args, kwargs, batched, sources)
            except Exception:
                self._failed = func
                raise
        else:
            # What depends on parameters and constants alone is computed once for all examples.
            result = func(*args, **kwargs)
            if sources and isinstance(result, Tensor) and is_batched(result):  # random numbers, others for each example
                result = self._with_copies(func, args, kwargs, sources)
        self._provenance.add_made(result)
        return result

    def _with_examples(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batched: int, sources: list[Tensor]
    ) -> Any:
        if "memory_format" in kwargs:  # layout alone, and that of one example says nothing of that of all of them
            kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
            if func == Tensor.to and len(args) + len(kwargs) == 1:
                return args[0]
        rule = RULES.get(func) if sources else None  # a user's rule takes precedence over a rewrite
        if rule is None and func in REWRITES:
            with self:
                result = REWRITES[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not sources:
            return func(*args, **kwargs)
        if rule is not None:
            result = self._record(rule, func, args, kwargs, batched, sources)
            if result is not NotImplemented:
                return result
        return self._with_copies(func, args, kwargs, sources)

    def _record(
        self, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batched: int, sources: list[Tensor]
    ) -> Any:
        arguments = dict(zip(rule.arguments, args, strict=False)) | kwargs
        x = arguments.pop(rule.arguments[0])
        trained = {
            own: arguments[own] for own in rule.trained if any(arguments.get(own) is source for source in sources)
        }
        if batched != 1 or not is_batched(x) or len(trained) != len(sources) or not rule.covers(arguments):
            return NotImplemented
        lead = x.dim() - rule.row_dims(x, arguments)
        shape = x.shape[:lead]
        if lead < 0 or 0 in shape:
            return NotImplemented
        inner = unwrapped(x)
        with below_transforms():
            rows = inner.flatten(0, lead) if lead else inner
            result: Any = NotImplemented
            if rule.folded is not None:

                def for_each_row(own: str) -> Tensor:
                    """Weights (b * K, *shape); the rows of an example share its copy."""
                    value = arguments[own]
                    frozen = value.expand(self._batch_size, *value.shape)
                    copies = self._sources.leaf(value) if own in trained else frozen
                    return copies.unsqueeze(1).expand(-1, prod(shape), *value.shape).flatten(0, 1)

                result = rule.folded(rows, arguments, for_each_row)
            if result is NotImplemented:
                result = self._by_rule(rule, func, rows, arguments, trained)
            return wrapped(result.view(self._batch_size, *shape, *result.shape[1:]) if lead else result, self._level)

    def _by_rule(
        self, rule: Rule, func: Any, rows: Tensor, arguments: dict[str, Any], trained: Mapping[str, Tensor]
    ) -> Tensor:
        """Call a function on rows (b * K, ...), and let its rule wait for the gradient of the output."""
        names = {}
        for own, value in trained.items():
            source = self._sources.of(value)
            source.uses += 1
            names[own], arguments[own] = source.name, value.detach()
        result: Tensor = func(rows, **arguments)
        call = Call(rows.detach(), arguments, names, len(rows) // self._batch_size)
        if not result.requires_grad:
            result = started(result)
        result.register_hook(functools.partial(self._receive, [rule, call, version_of(rows)]))
        return result

    def _with_copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Tensor]) -> Any:
        """Call a function with a copy of each source for each example, as a tensor of the example."""
        copies = {id(source): self._sources.copies(source, self._level) for source in sources}
        args, kwargs = tree_map_only(Tensor, lambda tensor: copies.get(id(tensor), tensor), (args, kwargs))
        with self:
            return func(*args, **kwargs)

    def _becomes_batched(self, func: Any, target: Any) -> bool:
        """Give each example its own copy of a shared tensor that is to be written to; false if it is not shared."""
        targets: list[Tensor] = []
        collect((target,), targets)
        shared = [tensor for tensor in targets if not is_batched(tensor)]
        for tensor in shared:
            if level() != self._level or not self._provenance.is_only_here(tensor):
                raise ModelError(SHARED_DRAW if func in DRAWN_IN_PLACE else SHARED_WRITE)
            with below_transforms():
                copies = wrapped(tensor.expand(self._batch_size, *tensor.shape).clone(), self._level)
            self._provenance.swap(tensor, copies)
        return bool(shared)

    # The backward pass

    def _receive(self, waiting: list[Any], gradient: Tensor) -> None:
        """Take the gradient of a call's output; ``waiting`` has the rule, the call and the version of its input."""
        rule, call, version = waiting
        waiting.clear()  # the graph and its hook outlive the backward pass
        if version_of(call.inputs) != version:
            raise ModelError(
                f"The input of a function that uses {', '.join(call.names.values())} is changed in place after the "
                "function has seen it, so its gradient is lost. Use an operation that makes a new tensor."
            )
        contribution = rule.contribution(call, gradient.detach())
        if self._single.issuperset(contribution.names):
            self._take(contribution)
            return
        for name, gradients in contribution.formed().gradients.items():
            self._sources.add(name, gradients)

    def _hand_over(self) -> None:
        """Hand over parameters with several uses, copies or computations, whose gradients add up before the norm."""
        total: dict[str, Tensor] = {}
        for name, gradients in self._sources.gradients():
            total[name] = total[name] + gradients if name in total else gradients
        if total:
            self._take(PerExample(total))

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _require_no_gradients(self) -> None:
        for name in self._gradients():
            raise ModelError(
                f"A gradient reaches the parameter '{name}' without passing through the torch functions that the "
                "private step sees, as in scripted functions (torch.jit.script). Set the environment variable "
                f"PYTORCH_JIT=0, which leaves functions unscripted, or {ONE_BY_ONE}."
            )

    def _require_no_hooks(self) -> None:
        for name, parameter in self._parameters.items():
            if has_hooks(parameter):
                raise ModelError(f"The parameter '{name}' has a hook. {HOOKS}")
