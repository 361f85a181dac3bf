"""Records what the layers see in a forward pass and what comes back in the one backward pass.

While the engine records, parameters do not require gradients, so the backward pass computes the gradients of
activations only. Each unit of the model contributes its per-example gradients as the gradient of its output arrives.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.broadcast import copies_of, per_example, stand_in
from dp_lightning.privacy.gradients.contribution import Contribution, PerExample, add_up
from dp_lightning.privacy.gradients.units import Unit, units_of
from dp_lightning.privacy.gradients.vmapped import vmapped_gradients


class GradientEngine:
    """Per-example gradients of a model's trained parameters, one physical batch at a time.

    Use::

        with engine.record(b, take):        # take is called with each contribution
            loss = ...                      # mean of the b losses
            engine.scale(loss, b)           # seeds the backward pass with b: gradients of the single losses
            loss.backward()

    Args:
        model: the model; parameters that require a gradient now are the trained ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ModelError("The model has no parameter that requires a gradient: there is nothing to train.")
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.units = units_of(model)
        _warn_of_fallback(self.units)
        self._handles: list[Any] = []
        for unit in self.units:
            self._attach(unit)
        self.ways: dict[str, str] = {}
        self._batch_size = self._depth = 0
        self._passes = self._augmult = 1
        self._listening = self._receiving = False
        self._uses: Counter[str] = Counter()
        self._take: Callable[[Contribution], None] | None = None
        self._partial: list[PerExample] = []

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def unused(self) -> list[str]:
        """Trained parameters whose modules did not run in the last physical batch."""
        return [name for name in self.parameters if not self._uses[name]]

    def explanation(self) -> str:
        """A line per module: its name, its type, and how its gradients were taken in the last physical batch."""
        rows = [
            (unit.name or "(model)", type(unit.module).__name__, self.ways.get(unit.name, "not used"))
            for unit in self.units
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {way}" for name, kind, way in rows)

    @contextmanager
    def record(self, batch_size: int, take: Callable[[Contribution], None], *, augmult: int = 1) -> Iterator[None]:
        """Listen to one forward and one backward pass; see ``begin``."""
        self.begin(batch_size, take, augmult=augmult)
        try:
            yield
            self.finish()
        finally:
            self.end()

    def begin(
        self, batch_size: int, take: Callable[[Contribution], None], *, augmult: int = 1, passes: int = 1
    ) -> None:
        """Start to listen; every parameter stops to require a gradient until ``end``.

        Args:
            batch_size: number of examples b.
            take: called with each contribution as its gradient arrives; no parameter is in two of them.
            augmult: K, the rows of each example, which follow each other: the model sees b * K rows, and an example's
                gradient is the sum of those of its rows.
            passes: how many forward and backward passes there will be over the same examples, each after ``again``.
                An example's gradients of all passes add up before the norm is taken.
        """
        self._batch_size, self._take = batch_size, take
        self._augmult, self._passes = augmult, passes
        self._uses.clear()
        self._partial = []
        self.again()
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    def again(self) -> None:
        """Listen to another forward pass over the same examples."""
        self._listening, self._receiving, self._depth = True, False, 0

    def finish(self) -> None:
        """After the backward pass: hand over the parameters with several uses, whose contributions add up."""
        partial, self._partial = self._partial, []
        if partial:
            together = partial[0]
            for contribution in partial[1:]:
                together = add_up(together, contribution)
            assert self._take is not None
            self._take(together)

    def end(self) -> None:
        """Stop to listen."""
        self._listening = self._receiving = False
        self._take, self._partial = None, []
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def scale(self, loss: Tensor, factor: float) -> None:
        """Multiply the gradient that enters the backward pass at ``loss``; the forward pass is over."""
        self._listening, self._receiving = False, True
        if not loss.requires_grad:
            raise ModelError(
                "The loss does not depend on any trained parameter by way of a call of its module. Compute it from the "
                "model's output, outside of torch.no_grad(). A parameter that training_step takes directly, such as "
                "self.scale * x, belongs, with its use, in the forward of a module inside."
            )
        loss.register_hook(lambda gradient: gradient * factor)

    def _attach(self, unit: Unit) -> None:
        if unit.kind == "broadcast":
            self._handles.append(unit.module.register_forward_pre_hook(lambda module, args: self._replace(unit)))
            self._handles.append(
                unit.module.register_forward_hook(lambda module, args, output: self._restore(unit), always_call=True)
            )
            return
        if unit.kind == "vmapped":
            self._handles.append(unit.module.register_forward_pre_hook(lambda module, args: self._enter(1)))
            self._handles.append(
                unit.module.register_forward_hook(lambda module, args, output: self._enter(-1), always_call=True)
            )
        self._handles.append(
            unit.module.register_forward_hook(
                lambda module, args, kwargs, output: self._saw(unit, args, kwargs, output),
                with_kwargs=True,
                prepend=True,  # what the module returned, before another hook changes it
            )
        )

    def _enter(self, step: int) -> None:
        """Count how many vmapped modules run: what runs inside of one is a part of it, wherever else it stands."""
        self._depth += step

    def _saw(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not (self._listening or self._receiving) or not torch.is_grad_enabled():
            return output
        if self._depth > (1 if unit.kind == "vmapped" else 0):
            return output
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check_rows(unit, tensors)
        seen = _Seen(unit, tensors)
        if self._receiving:
            if not all(self._uses[self._names[id(p)]] for p in unit.parameters.values()):
                raise ModelError(
                    f"Module '{unit.name}' ({type(unit.module).__name__}) runs for the first time in the backward "
                    "pass, so its gradients cannot be told by example. Checkpoint activations with use_reentrant=False."
                )
            # Activation checkpointing runs the forward pass again. It has to save the same tensors as the first time.
            return tree_map(lambda leaf: _started(leaf) if isinstance(leaf, Tensor) else leaf, output)
        self._uses.update(self._names[id(p)] for p in unit.parameters.values())
        if unit.kind == "rule":
            return _on_gradient(
                output, self._once(unit, lambda gradient: self._rule_gradient(unit, seen.tensors()[0], gradient))
            )

        def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
            values = iter(seen.tensors())
            return tree_unflatten([next(values) if isinstance(leaf, Tensor) else leaf for leaf in rest], spec)

        # Without the tensors themselves, which ``seen`` has.
        rest = [leaf.new_empty(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._watch_vmapped(unit, call, output)

    def _once(self, unit: Unit, receive: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Take the gradient of the one backward pass that ``scale`` has announced, and refuse a second one.

        Gradients that a training step takes for its own ends, such as a saliency map, come earlier and are passed by.
        """
        waiting: Callable[[Tensor], None] | None = receive

        def take(gradient: Tensor) -> None:
            nonlocal waiting
            if not self._receiving:
                return
            if waiting is None:
                raise ModelError(
                    f"Module '{unit.name}' ({type(unit.module).__name__}) got a gradient twice: there is more than one "
                    "backward pass in a batch. A private step needs exactly one."
                )
            # The graph outlives the backward pass, and with it this function: let go of what the module has seen.
            receive_now, waiting = waiting, None
            receive_now(gradient)

        return take

    def _rule_gradient(self, unit: Unit, inputs: Tensor, gradient: Tensor) -> None:
        names = {own: self._names[id(p)] for own, p in unit.parameters.items()}
        with _plain_arithmetic(gradient):
            contribution = unit.rule.contribution(unit.module, inputs, gradient, names, self._augmult)
            if self._passes == 1 and all(self._uses[name] == 1 for name in names.values()):
                assert self._take is not None
                self._take(contribution)
            else:
                self._partial.append(contribution.formed())
        self.ways[unit.name] = contribution.way

    def _watch_vmapped(
        self, unit: Unit, call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], output: Any
    ) -> Any:
        outputs = [tensor for tensor in tree_flatten(output)[0] if isinstance(tensor, Tensor)]
        floating = [index for index, tensor in enumerate(outputs) if tensor.is_floating_point()]
        position = iter(range(len(outputs)))

        def watch(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            index = next(position)
            if index not in floating:
                return tensor
            # Gradients of several outputs add up, so each is pulled back as it arrives.
            return _on_gradient(
                tensor,
                self._once(
                    unit,
                    lambda gradient: self._vmapped_gradient(
                        unit, call, [gradient if i == index else None for i in range(len(outputs))]
                    ),
                ),
            )

        return tree_map(watch, output)

    def _vmapped_gradient(
        self,
        unit: Unit,
        call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
        gradients: list[Tensor | None],
    ) -> None:
        args, kwargs = call()
        self._receiving = False  # the module runs again, and its hooks with it
        try:
            with torch.enable_grad(), _plain_arithmetic(next(g for g in gradients if g is not None)):
                formed = vmapped_gradients(
                    unit.module,
                    args,
                    kwargs,
                    gradients,
                    frozenset(unit.parameters),
                    self._batch_size,
                    self._augmult,
                )
        except Exception as error:
            raise ModelError(
                f"No per-example gradient can be taken at module '{unit.name}' ({type(unit.module).__name__}): "
                f"{error}\nReplace it by layers with known rules, or freeze its parameters."
            ) from error
        finally:
            self._receiving = True
        self._keep(unit, {self._names[id(unit.parameters[own])]: value for own, value in formed.items()}, "vmapped")

    def _replace(self, unit: Unit) -> None:
        if self._depth or not (self._listening or self._receiving) or not torch.is_grad_enabled():
            return
        for own, parameter in unit.parameters.items():
            copies = copies_of(parameter, self._batch_size)
            if self._listening:
                self._uses[self._names[id(parameter)]] += 1
                self._watch_copies(unit, parameter, copies)
            # An instance attribute is found before the entry in _parameters.
            unit.module.__dict__[own] = stand_in(parameter, copies, self._augmult)

    def _watch_copies(self, unit: Unit, parameter: nn.Parameter, copies: Tensor) -> None:
        name = self._names[id(parameter)]

        def receive(gradient: Tensor) -> None:
            self._keep(unit, {name: per_example(parameter, gradient.detach())}, "one copy per example")

        copies.register_hook(self._once(unit, receive))

    def _restore(self, unit: Unit) -> None:
        for own in unit.parameters:
            unit.module.__dict__.pop(own, None)

    def _keep(self, unit: Unit, gradients: dict[str, Tensor], way: str) -> None:
        self.ways[unit.name] = way
        self._partial.append(PerExample(gradients, way))

    def _check_rows(self, unit: Unit, tensors: list[Tensor]) -> None:
        first = tensors[0] if tensors else None
        if first is None or first.dim() == 0 or first.shape[0] != self._batch_size * self._augmult:
            views = f" with {self._augmult} views each" if self._augmult > 1 else ""
            raise ModelError(
                f"Module '{unit.name}' ({type(unit.module).__name__}) got an input of shape "
                f"{None if first is None else tuple(first.shape)} for {self._batch_size} examples{views}. The first "
                "dimension of every layer's input must be the batch (batch_first=True for recurrent layers), so that "
                "one example's gradient can be told from another's."
            )


def _warn_of_fallback(units: list[Unit]) -> None:
    """One warning that names what has no rule."""
    slow = [f"'{unit.name}' ({type(unit.module).__name__})" for unit in units if unit.kind == "vmapped"]
    if slow:
        names = ", ".join(slow[:5]) + (f" and {len(slow) - 5} more" if len(slow) > 5 else "")
        warnings.warn(
            f"No gradient rule for {names}: the per-example gradients there are taken by vmap, which runs the module "
            "again. They are exact, but slower and larger.",
            stacklevel=3,
        )


class _Seen:
    """What a module has seen, saved as autograd saves tensors: checkpointing and offloading apply to it."""

    def __init__(self, unit: Unit, tensors: list[Tensor]) -> None:
        self._unit = unit
        anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        self._node: Any = _Save.apply(anchor, *(tensor.detach() for tensor in tensors)).grad_fn

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors.

        Raises:
            ModelError: when one of them was changed in place.
        """
        try:
            return self._node.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise ModelError(
                f"The input of module '{self._unit.name}' ({type(self._unit.module).__name__}) is changed in place "
                "after the module has seen it, so its gradient is lost. Use an operation that makes a new one."
            ) from error


class _Save(torch.autograd.Function):
    """A node of the graph that saves tensors and leads nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(ctx.needs_input_grad[1:]))


def _on_gradient(output: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """Call ``receive`` with the gradient of ``output``, also where nothing before it requires one."""
    output = _started(output)
    output.register_hook(lambda gradient: receive(gradient.detach()))
    return output


def _started(output: Tensor) -> Tensor:
    if output.requires_grad or not output.is_floating_point():
        return output
    return _Start.apply(output, torch.zeros((), device=output.device, requires_grad=True))


class _Start(torch.autograd.Function):
    """Starts the graph at a layer whose input needs no gradient. The copy allows in-place changes of the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def _plain_arithmetic(tensor: Tensor) -> Iterator[None]:
    """The dtypes that the rules choose, also where the backward pass runs inside autocast."""
    with torch.autocast(tensor.device.type, enabled=False):
        yield
