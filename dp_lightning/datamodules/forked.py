"""A function of many images, computed on the CPU by a process for each core.

Threads wait for each other at the end of every operation, and a network that computes features has many small ones.
Processes wait only for their next batch (`benchmarks/features.py`).
"""

import math
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset


def processes(batches: int) -> int:
    """How many processes to share some batches among; 0 where this process alone is to compute them.

    They start as copies of this one, which other systems than Linux do not support once libraries have been loaded.
    """
    count = min(torch.get_num_threads(), batches)
    return count if count > 1 and sys.platform == "linux" else 0


def shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in memory that is shared with processes that start as copies of this one.

    It needs no room in ``/dev/shm``, of which containers have little.
    """
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class Filling(Dataset[int]):
    """Puts outputs for images into their places as it is read.

    Args:
        places: `shared_tensor` of (n, *shape).
        function: Takes images (b, C, H, W) and returns (b, *shape).
        images: n of them, with labels.
    """

    def __init__(self, places: Tensor, function: Callable[[Tensor], Tensor], images: Subset) -> None:
        self._places, self._function, self._images = places, function, images

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, indices: list[int]) -> list[int]:
        images = torch.stack([image for image, _ in self._images.__getitems__(indices)])
        self._places[indices[0] : indices[-1] + 1] = self._function(images)
        return indices

    def by_processes(self, count: int, batch_size: int) -> DataLoader:
        """A loader that yields the size of each batch, in order, once one of ``count`` processes has put it there."""
        return DataLoader(self, batch_size, num_workers=count, collate_fn=len, multiprocessing_context="fork")
