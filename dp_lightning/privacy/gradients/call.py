"""One recorded call of a function, as a rule sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A call of a function on all rows of a physical batch.

    Attributes:
        inputs: what the function saw, (b * K, ...); the K rows of an example follow each other.
        arguments: the other arguments by name; trained ones are detached.
        names: maps each trained argument to the name under which its gradients are handed over.
        rows: K. It is 1 if the function saw no dimension of rows.
    """

    inputs: Tensor
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    rows: int

    @property
    def weight_shape(self) -> torch.Size:
        """The shape of the argument ``weight``."""
        weight: Tensor = self.arguments["weight"]
        return weight.shape
