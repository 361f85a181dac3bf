"""Embeddings: grad W_i has, in the row of each index, the sum of the output gradients where the index occurs.

An example touches at most as many rows as it has indices. They are added up in one slot per distinct index, so nothing
of the table's size exists per example, and the norm is that of what is summed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.contribution import Call, Contribution, PerExample, Weights, part_norms, scaled


def embedding_rows(call: Call, gradient: Tensor) -> Contribution:
    """The gradients of the table of ``F.embedding``: ``call.inputs`` are indices (b * K, ...)."""
    indices = call.inputs.reshape(len(call.inputs) // call.rows, -1)
    rows = gradient.reshape(*indices.shape, gradient.shape[-1])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    num_embeddings, padding_idx = call.weight_shape[0], call.arguments.get("padding_idx")
    if padding_idx is not None:
        rows = rows.masked_fill((indices == padding_idx % num_embeddings).unsqueeze(2), 0.0)
    return _Rows(call.names["weight"], indices, rows, num_embeddings)


class _Rows(Contribution):
    """Gradients that are zero except in a few rows of the weight."""

    def __init__(self, name: str, indices: Tensor, rows: Tensor, num_embeddings: int) -> None:
        """``indices``: (b, t); ``rows``: (b, t, features)."""
        self._name, self._num_embeddings = name, num_embeddings
        # A slot per distinct index, in the order of the indices.
        ordered, positions = indices.sort(dim=1)
        slots = torch.zeros_like(indices)
        slots[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
        self._indices = torch.zeros_like(indices).scatter_(1, slots, ordered)  # of each slot; 0 if it is empty
        slots = torch.empty_like(slots).scatter_(1, positions, slots)
        self._slots = torch.zeros_like(rows).scatter_add_(1, slots.unsqueeze(2).expand_as(rows), rows)
        self.method = "rows"

    @property
    def names(self) -> tuple[str, ...]:
        return (self._name,)

    def formed(self) -> PerExample:
        b, _, features = self._slots.shape
        full = self._slots.new_zeros(b, self._num_embeddings, features)
        full.scatter_add_(1, self._indices.unsqueeze(2).expand_as(self._slots), self._slots)
        return PerExample({self._name: full}, self.method)

    def norms(self) -> dict[str, Tensor]:
        return {self._name: part_norms(self._slots)}

    def add_weighted(self, weights: Weights, sums: Mapping[str, Tensor]) -> None:
        slots = scaled(self._slots, weights[self._name]).float()
        sums[self._name].index_add_(0, self._indices.flatten(), slots.flatten(0, 1))
