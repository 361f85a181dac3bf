"""Which of the exact methods of ``products`` is the cheapest for a layer.

The choice depends on sizes, types, the kind of processor and the number of threads, not on anything measured while the
program runs, so two runs on one machine use the same methods and round alike. Costs are counted in float32
multiplications of a matrix product, relative to the ordinary weight gradient, which every method but ``formed``
computes as well. ``docs/performance.md`` explains the methods.
"""

import functools
from dataclasses import dataclass

import torch

from dp_lightning.processors import below_avx512
from dp_lightning.torch_internals import has_bfloat16_on_cpu

# A gradient that is formed is written once and read twice, for its norm and for the sum. The convolution library
# also reorders the numbers of a folded one.
_PER_KEPT_NUMBER = 26
_PER_CACHED_NUMBER = 12
_PER_FOLDED_NUMBER = 60
# A float64 multiplication takes the time of two; the passes over a Gram matrix besides its products take that of 600.
_DOUBLE = 2
_PER_GRAM_NUMBER = 600
# Kept gradients may take this many times the memory of what the layer has seen and returned, and more only where Gram
# matrices would cost more than the gradients themselves.
_MEMORY = 3
# With fewer positions, a grouped convolution spends its time on reordering the weight's numbers; with fewer channels,
# it does not fill its vectors.
_FEW_POSITIONS = 64
_FEW_CHANNELS = 8
# A patch of few positions is copied in runs of the channels at a place of the kernel if these are enough for a run.
_SHORTEST_RUN = 4
# Numbers in flight while gradients are formed: what the caches hold on a CPU; a share of the memory of a GPU, so that
# the number of operations does not grow with the batch.
_CACHED_PER_THREAD = 2**21
_SHARE_ON_GPU = 1 / 16
# Bytes of a device that does not say how much memory it has.
_MEMORY_OF_A_GPU = 2**36


@dataclass(frozen=True)
class Size:
    """Sizes of one example's factors; the weight is (groups * outputs, inputs) as a matrix."""

    groups: int
    positions: int
    outputs: int  # of one group
    inputs: int  # of one group
    gram: int  # multiplications for the Gram matrix of P, of all groups
    seen: int  # numbers that the layer has seen and returned

    @property
    def weight(self) -> int:
        return self.groups * self.outputs * self.inputs

    @property
    def patches(self) -> int:
        """Numbers in P."""
        return self.groups * self.positions * self.inputs

    @property
    def product(self) -> int:
        """Multiplications for the gradient."""
        return self.positions * self.weight


def kept_method(size: Size) -> str:
    """The method for a layer whose clipping factors are known only after its norms are computed."""
    cost = _gram(size)
    is_kept = size.weight <= _MEMORY * size.seen or cost > size.product
    return "formed" if is_kept and _PER_KEPT_NUMBER * size.weight <= cost else "Gram"


def streamed_method(size: Size, *, by_products: bool) -> str:
    """The method for a layer whose own norm alone decides; ``by_products`` tells how its gradients are formed."""
    per_number = _PER_CACHED_NUMBER if by_products else _PER_FOLDED_NUMBER
    return "Gram" if _gram(size) < per_number * size.weight else "formed"


def examples_at_a_time(numbers: int, device: torch.device) -> int:
    """How many examples to take at a time when each has ``numbers`` intermediate results."""
    if device.type != "cpu":
        return max(int(_SHARE_ON_GPU * _memory(device) / 4) // max(numbers, 1), 1)
    # A multiple of the number of threads, so that each has its own examples.
    return max(_CACHED_PER_THREAD // max(numbers, 1), 1) * torch.get_num_threads()


@functools.lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    """Bytes of memory of a device; all of it, so that the number does not depend on what else runs."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _MEMORY_OF_A_GPU


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which products of tensors of ``dtype`` are fast; float32 if 16-bit products are emulated."""
    if dtype in (torch.bfloat16, torch.float16) and device.type == "cpu" and not has_bfloat16_on_cpu():
        return torch.float32
    return dtype


def formed_by_products(size: Size, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether to form a convolution's per-example gradients by products of patches, not by one grouped convolution."""
    if device.type != "cpu" or dtype != torch.float32 or below_avx512(device):
        return True
    return size.positions < _FEW_POSITIONS or (channels < _FEW_CHANNELS and size.patches <= _CACHED_PER_THREAD)


def patches_by_place(size: Size, channels: int, device: torch.device) -> bool:
    """Whether the channels at a place of the kernel stand together in a patch of an image where they do not."""
    return device.type == "cpu" and size.positions < _FEW_POSITIONS and channels >= _SHORTEST_RUN


def _gram(size: Size) -> int:
    """Cost of the norms by Gram matrices."""
    pairs = size.groups * size.positions**2
    return _DOUBLE * (size.gram + pairs * size.outputs) + _PER_GRAM_NUMBER * pairs
