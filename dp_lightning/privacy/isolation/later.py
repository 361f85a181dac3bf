"""What a device knows and nobody has read yet.

To read a number of a GPU is to wait for all that the GPU still has to do. So what is found out there, such as whether a
tensor has changed, is read together, once in a logical step, before the step is recorded and released.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dp_lightning.processors import read_at_once

Then = Callable[[Tensor], None]
"""Gets the numbers on the CPU."""


class Later:
    """Numbers of devices that wait to be read, in the order in which they were given."""

    def __init__(self) -> None:
        self._waiting: dict[torch.device, list[tuple[Tensor, Then]]] = {}

    def read(self, tensor: Tensor, then: Then) -> None:
        """Have ``then`` called with the numbers of ``tensor``: at once on a CPU, otherwise by ``settle``.

        Args:
            tensor: that nothing writes to any more.
            then: called once; it may raise.
        """
        if read_at_once(tensor.device):
            then(tensor)
        else:
            self._waiting.setdefault(tensor.device, []).append((tensor, then))

    def settle(self) -> None:
        """Read all that waits, with one copy from each device.

        Raises:
            Exception: the first that a call raised, after all calls were made.
        """
        waiting, self._waiting = self._waiting, {}
        error: Exception | None = None
        for there in waiting.values():
            for (_, then), numbers in zip(there, on_cpu([tensor for tensor, _ in there]), strict=True):
                try:
                    then(numbers)
                except Exception as raised:  # whatever is found wrong; the others have to be told too
                    error = error or raised
        if error is not None:
            raise error


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device, brought over together."""
    in_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.cat(in_bytes).cpu().split([len(part) for part in in_bytes])
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
