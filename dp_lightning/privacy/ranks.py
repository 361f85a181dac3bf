"""The processes that take one private step together."""

from dataclasses import dataclass

import torch.distributed
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; they are the default process group of torch.distributed.

    Args:
        rank: number of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def add_up(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks, which is the same on each of them bit for bit."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
