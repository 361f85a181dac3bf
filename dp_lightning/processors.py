"""What a processor is good at."""

import torch
from torch import Tensor


def read_at_once(device: torch.device) -> bool:
    """Whether to read a number costs less than a pass over a tensor; a GPU has to finish all that it does first."""
    return device.type == "cpu"


def below_avx512(device: torch.device) -> bool:
    """Whether this is a CPU without AVX-512.

    There, a product of patches is as fast as the ordinary weight gradient of a convolution, since the convolution
    library has no better arithmetic than the library of matrix products, and channels-last images are faster.
    """
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite, by the extremes, of which both are NaN if a number is: one pass, no copy."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return not numbers.numel() or bool(torch.stack(numbers.aminmax()).isfinite().all())


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device.

    A copy from ordinary memory to a GPU waits until the GPU has done all that was started before; one from page-locked
    memory joins the queue.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
