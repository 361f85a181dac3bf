"""What a device knows and nobody has read yet.

To read a number of a GPU is to wait for all that the GPU still has to do. So what is found out there, such as whether a
tensor has changed, is read together, once in a logical step, before the step is released.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dp_lightning.processors import read_at_once

Then = Callable[[Tensor], None]
"""Gets the numbers on the CPU; may raise, and may be called again if it was interrupted."""


class Later:
    """Numbers of devices that wait to be read, in the order in which they were given.

    Args:
        broken: called with the first error that is found.

    Attributes:
        error: the first that a call raised, or the reading. It stays: what one step has left behind, the next one uses.
    """

    def __init__(self, broken: Callable[[Exception], None] = lambda error: None) -> None:
        self._waiting: dict[torch.device, list[tuple[Tensor, Then]]] = {}
        self._broken = broken
        self.error: Exception | None = None

    def read(self, tensor: Tensor, then: Then) -> None:
        """Have ``then`` called with the numbers of ``tensor``: at once on a CPU, otherwise by ``look``.

        Args:
            tensor: that nothing writes to any more. One of bools is set where something is wrong.
            then: what to do with them.
        """
        if read_at_once(tensor.device):
            then(tensor)
        else:
            self._waiting.setdefault(tensor.device, []).append((tensor, then))

    def look(self) -> None:
        """Read all that waits, with one copy from each device, and note the first error."""
        for device, there in list(self._waiting.items()):
            try:
                numbers = on_cpu([tensor for tensor, _ in there])  # an interruption loses nothing
            except Exception as error:  # such as too little memory
                self._note(error)
                continue
            for each in numbers:
                try:
                    there[0][1](each)
                except Exception as error:  # whatever is found wrong; the others have to be told too
                    self._note(error)
                del there[0]
            del self._waiting[device]

    def settle(self) -> None:
        """Read all that waits.

        Raises:
            Exception: the first that was ever found.
        """
        self.look()
        if self.error is not None:
            raise self.error

    def wrong(self, device: torch.device) -> Tensor:
        """Whether something is known or waits there that is wrong: a float32 number of 0 or 1 on the device."""
        flags = [tensor.any() for tensor, _ in self._waiting.get(device, ()) if tensor.dtype == torch.bool]
        known = torch.full((), self.error is not None, device=device)
        return torch.stack([known, *flags]).any().float()

    def _note(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._broken(error)


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device, brought over together."""
    in_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.cat(in_bytes).cpu().split([len(part) for part in in_bytes])
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
