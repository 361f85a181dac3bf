"""Trained parameters, and what is computed from them, where they meet the tensors of examples.

What is computed from parameters alone is computed once. Its per-example gradients, added up over its uses, are pulled
back through that computation, so that each parameter ends up with one gradient per example.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_lightning.errors import ModelError
from dp_lightning.torch_internals import below_transforms, version_of, wrapped

# Numbers of parameters for which gradients are pulled back at once: 256 MiB in float32.
_PULLED = 2**26


@dataclass(slots=True)
class Source:
    """A trained parameter, or what is computed from trained parameters."""

    name: str
    tensor: Tensor
    parameters: dict[str, Tensor]  # that the tensor is computed from
    version: int
    uses: int = 0
    copies: Tensor | None = None
    leaf: Tensor | None = None
    gradients: Tensor | None = None  # (b, *shape), added up over uses

    def add(self, gradients: Tensor) -> None:
        """Add gradients, in float32 at least."""
        gradients = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
        self.gradients = gradients if self.gradients is None else self.gradients + gradients

    def require_unchanged(self) -> None:
        if version_of(self.tensor) != self.version:
            raise ModelError(
                f"A weight of shape {tuple(self.tensor.shape)} that is computed from {', '.join(self.parameters)} is "
                "changed in place after it was used. Use an operation that makes a new tensor."
            )


class Sources:
    """The sources of one physical batch.

    Args:
        parameters: trained parameters by name.
        batch_size: number of examples b.
    """

    def __init__(self, parameters: Mapping[str, Tensor], batch_size: int) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._batch_size = batch_size
        self._found: dict[int, Source] = {}
        self._by_name: dict[str, Source] = {}

    def of(self, tensor: Tensor) -> Source:
        """The source of a tensor.

        Raises:
            ModelError: when the tensor is computed from another one that is not a trained parameter.
        """
        known = self._found.get(id(tensor))
        if known is not None:
            return known
        name = self._names.get(id(tensor))
        if name is not None:
            parameters = {name: tensor}
        else:
            name, parameters = f"(computed {len(self._found)})", {}
            for leaf in leaves_of(tensor):
                if id(leaf) not in self._names:
                    raise ModelError(
                        f"training_step uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is not "
                        "a trained parameter of the module. Make it an nn.Parameter of the module, or detach it."
                    )
                parameters[self._names[id(leaf)]] = leaf
        source = Source(name, tensor, parameters, version_of(tensor))
        self._found[id(tensor)] = self._by_name[name] = source
        return source

    def copies(self, tensor: Tensor, at: int) -> Tensor:
        """Copies that replace a tensor, one for each example, inside the vmap of level ``at``."""
        source = self.of(tensor)
        if source.copies is None:
            with below_transforms():
                leaf = self.leaf(tensor)
            source.copies = wrapped(leaf, at)
        return source.copies

    def leaf(self, tensor: Tensor) -> Tensor:
        """The copies below the vmap: (b, *shape) in the memory of one; their ``grad`` has the examples' gradients."""
        source = self.of(tensor)
        if source.leaf is None:
            source.leaf = tensor.detach().expand(self._batch_size, *tensor.shape).requires_grad_()
            source.uses += 1
        return source.leaf

    def single(self) -> frozenset[str]:
        """Parameters that are used once, so that the gradients of that use are complete."""
        uses: dict[str, int] = {}
        for source in self._found.values():
            for name in source.parameters:
                uses[name] = uses.get(name, 0) + source.uses
        return frozenset(name for name, count in uses.items() if count == 1)

    def add(self, name: str, gradients: Tensor) -> None:
        """Add gradients (b, ...) to the source of that name."""
        self._by_name[name].add(gradients)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Parameter name and gradients (b, ...); the gradients of one name still have to be added up."""
        for source in self._found.values():
            source.require_unchanged()
            if source.leaf is not None and source.leaf.grad is not None:
                source.add(source.leaf.grad)
                source.leaf.grad = None
            gradients, source.gradients = source.gradients, None
            if gradients is None:
                continue
            if source.name in source.parameters:
                yield source.name, gradients
            else:
                yield from _pulled_back(source, gradients).items()


def started(output: Tensor) -> Tensor:
    """The output of a function whose input needs no gradient, as the start of a graph."""
    result: Tensor = _Start.apply(output.detach(), torch.empty((), device=output.device, requires_grad=True))
    return result


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """The leaves of a graph."""
    if tensor.grad_fn is None:
        yield tensor
        return
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        waiting.extend(parent for parent, _ in node.next_functions if parent is not None)


def _pulled_back(source: Source, gradients: Tensor) -> dict[str, Tensor]:
    """Gradients (b, ...) of the parameters that a source is computed from, a piece of the batch at a time."""
    step = max(_PULLED // max(sum(p.numel() for p in source.parameters.values()), 1), 1)
    pieces: dict[str, list[Tensor]] = {}
    for piece in gradients.to(source.tensor.dtype).split(step):
        with torch.enable_grad():
            found = torch.autograd.grad(
                source.tensor,
                list(source.parameters.values()),
                piece,
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
        for name, part in zip(source.parameters, found, strict=True):
            if part is not None:
                pieces.setdefault(name, []).append(part.to(torch.promote_types(part.dtype, torch.float32)))
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}


class _Start(torch.autograd.Function):
    """Starts the graph at a function whose input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # no copy
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None
