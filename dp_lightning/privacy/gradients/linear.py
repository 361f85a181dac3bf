"""Linear layers: grad W_i = sum over tokens t of g_it x_it^T, on any leading dimensions after the batch.

With one token the gradient is a rank-one product, so its norm is ||g_i|| ||x_i|| and no gradient needs to be formed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dp_lightning.privacy.gradients.contribution import Contribution


class LinearRule:
    """Rule of ``nn.Linear``."""

    def per_example(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        x, g = _tokens(inputs).to(grad_output.dtype), _tokens(grad_output)
        gradients = {}
        if "weight" in wanted:
            gradients["weight"] = torch.bmm(g.transpose(1, 2), x)
        if "bias" in wanted:
            gradients["bias"] = g.sum(1)
        return gradients

    def factored(
        self, module: nn.Module, inputs: Tensor, grad_output: Tensor, names: Mapping[str, str]
    ) -> Contribution | None:
        # On a GPU products may run in TF32, so the sum would not be what was measured.
        if inputs.dim() != 2 or inputs.device.type != "cpu":
            return None
        return _RankOne(names, inputs.float(), grad_output.float())


def _tokens(tensor: Tensor) -> Tensor:
    """(b, ..., d) as (b, t, d)."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


class _RankOne(Contribution):
    """Gradients g_i x_i^T and g_i of a linear layer that saw one vector per example."""

    def __init__(self, names: Mapping[str, str], x: Tensor, g: Tensor) -> None:
        self.names, self.x, self.g = names, x, g  # names: own name to model name; x: (b, in); g: (b, out)

    def squared_norms(self) -> dict[str, Tensor]:
        g = self.g.square().sum(1)
        norms = {"weight": g * self.x.square().sum(1), "bias": g}
        return {name: norms[own] for own, name in self.names.items()}

    def discard(self, rows: Tensor) -> None:
        self.x, self.g = self.x.masked_fill(rows[:, None], 0.0), self.g.masked_fill(rows[:, None], 0.0)

    def weighted_sum(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sums = {}
        for own, name in self.names.items():
            weight = weights[name]
            sums[name] = (self.g * weight[:, None]).T @ self.x if own == "weight" else weight @ self.g
        return sums
