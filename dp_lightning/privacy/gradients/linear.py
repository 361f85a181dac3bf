"""Linear layers: grad W_i = sum over tokens t of g_it x_it^T, on any leading dimensions after the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.cost_model import Size, product_dtype
from dp_lightning.privacy.gradients.products import Empty, Factors

# Layers that have seen and returned at most so many numbers are taken together: more are not worth a copy.
_SMALL_LAYER = 2**16


class Tokens(Factors):
    """The factors of ``F.linear``, of L layers of one size: the output gradients and the inputs as they are.

    Args:
        x: (b, L, t, in), the inputs; the tokens of an example's views are tokens of the example.
        g: (b, L, t, out), the output gradients.
    """

    def __init__(self, x: Tensor, g: Tensor) -> None:
        self._x, self._g = x, g
        self.batch_size, layers, t, inner = x.shape
        self.device, self.dtype = x.device, product_dtype(g.dtype, x.device)
        outer, gram = g.shape[3], layers * t * t * inner
        self.size = Size(layers, t, outputs=outer, inputs=inner, gram=gram, seen=layers * t * (inner + outer))
        if self.batch_size * self.size.seen <= _SMALL_LAYER:
            self.kind = self.size, x.dtype, g.dtype

    @classmethod
    def of_rows(cls, inputs: Tensor, grad_output: Tensor, augmult: int) -> "Tokens":
        """Of one layer, from rows (b * K, ...)."""
        shape = len(inputs) // augmult, 1, -1
        return cls(inputs.reshape(*shape, inputs.shape[-1]), grad_output.reshape(*shape, grad_output.shape[-1]))

    def joined(self, others: Sequence["Tokens"]) -> "Tokens":
        every = (self, *others)
        return Tokens(torch.cat([each._x for each in every], dim=1), torch.cat([each._g for each in every], dim=1))

    def left(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self._g[rows].to(dtype)

    def right(self, rows: slice, dtype: torch.dtype, empty: Empty = torch.empty) -> Tensor:
        return self._x[rows].to(dtype)

    def bias(self, rows: slice) -> Tensor:
        return self._g[rows].sum(2, dtype=torch.promote_types(self.dtype, torch.float32)).flatten(1)

    def weight(self, gradients: Tensor) -> Tensor:
        return gradients[:, 0]

    def rows_of(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-3)

    def let_go(self) -> None:
        del self._x, self._g
