"""Linear layers: grad W_i = sum over tokens t of g_it x_it^T, on any leading dimensions after the batch."""

import torch
from torch import Tensor

from dp_lightning.privacy.gradients.cost_model import Size, product_dtype
from dp_lightning.privacy.gradients.products import Empty, Factors


class Tokens(Factors):
    """The factors of ``F.linear``: G and P are the output gradients and the inputs as they are."""

    def __init__(self, inputs: Tensor, grad_output: Tensor, augmult: int) -> None:
        # The tokens of an example's views are tokens of the example.
        self.batch_size, self.device = len(inputs) // augmult, inputs.device
        self._x = inputs.reshape(self.batch_size, -1, inputs.shape[-1])  # (b, t, in)
        self._g = grad_output.reshape(self.batch_size, -1, grad_output.shape[-1])  # (b, t, out)
        self.dtype = product_dtype(grad_output.dtype, inputs.device)
        t, inner, outer = *self._x.shape[1:], self._g.shape[2]
        self.size = Size(
            groups=1, positions=t, outputs=outer, inputs=inner, gram=t * t * inner, seen=t * (inner + outer)
        )

    def left(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self._g[rows].to(dtype).unsqueeze(1)

    def right(self, rows: slice, dtype: torch.dtype, empty: Empty = torch.empty) -> Tensor:
        return self._x[rows].to(dtype).unsqueeze(1)

    def bias(self, rows: slice) -> Tensor:
        return self._g[rows].sum(1, dtype=torch.promote_types(self.dtype, torch.float32))

    def weight(self, gradients: Tensor) -> Tensor:
        return gradients[:, 0]

    def rows_of(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-3)

    def let_go(self) -> None:
        del self._x, self._g
