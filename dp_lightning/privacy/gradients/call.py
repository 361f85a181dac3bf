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
        arguments: the others by name; trained ones without gradient.
        names: of the trained arguments, to the names under which their gradients are handed over.
        rows: K. It is 1 where the function saw no dimension of rows.
    """

    inputs: Tensor
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    rows: int

    @property
    def weight_shape(self) -> torch.Size:
        """Of the argument ``weight``."""
        weight: Tensor = self.arguments["weight"]
        return weight.shape
