"""Standard normal numbers that nobody can draw again.

Where some coordinates of the gradient are zero for every example, a released gradient shows the noise itself there. A
generator with a short seed is then found by trying all seeds (torch's mt19937 of the CPU takes 32 bits), and one that
is linear by solving for its state; either would give the noise of all other coordinates away.
"""

import math
import secrets
import ssl
from collections.abc import Sequence

import torch
from torch import Tensor

_PAIRS = 1 << 15  # 0.5 MiB of random bytes, so that a block stays in the cache
_SEEDS = 4


def secret_normals(shape: Sequence[int], device: torch.device) -> Tensor:
    """Independent N(0, 1) values in float32, of ``shape`` on ``device``.

    On a CPU each pair comes from 128 bits of OpenSSL's generator, which is cryptographic and seeded by the operating
    system, by Box and Muller in float64 with 53 bits for each uniform number. Other devices add up four draws of
    torch's own generator there (Philox), each with a fresh seed of 64 bits from the operating system, and halve: all
    four have to be found together.
    """
    if device.type == "cpu":
        return _from_bytes(math.prod(shape)).view(tuple(shape))
    return _from_seeds(shape, device)


def _from_bytes(count: int) -> Tensor:
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    for block in values.split(2 * _PAIRS) if count else ():
        pairs = -(-len(block) // 2)
        bits = torch.frombuffer(bytearray(ssl.RAND_bytes(16 * pairs)), dtype=torch.int64)
        # The shift keeps the sign: -2^52 to 2^52 - 1, and so 2^-53 to 1.
        uniform = (bits[:pairs] >> 11).double().add_(2.0**52 + 1).mul_(2.0**-53)
        radius = uniform.log_().mul_(-2).sqrt_()
        angle = (bits[pairs:] >> 11).double().mul_(math.pi * 2.0**-52)
        block[:pairs] = radius * angle.cos()
        block[pairs:] = (radius * angle.sin())[: len(block) - pairs]
    return values


def _from_seeds(shape: Sequence[int], device: torch.device) -> Tensor:
    generator = torch.Generator(device=device)
    total = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    for _ in range(_SEEDS):
        generator.manual_seed(secrets.randbits(64))
        total += torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device=device)
    return total.div_(math.sqrt(_SEEDS))
