"""Standard normal numbers that nobody can draw again.

Where some coordinates of the gradient are zero for every example, a released gradient shows the noise itself there. A
generator with a short seed is then found by trying all seeds (torch's mt19937 of the CPU takes 32 bits, Philox of the
GPU 64), and one that is linear by solving for its state; either would give the noise of all other coordinates away.
"""

import math
import secrets
import ssl
from collections.abc import Sequence

import torch
from torch import Tensor

from dp_lightning.privacy.chacha import KEY_BYTES, key_stream
from dp_lightning.processors import sent

# At a time: for each thread of a CPU 0.5 MiB of random bytes, which stay in its cache, and fewer of which torch would
# not share among threads; on a GPU 64 MiB.
_PAIRS = {"cpu": 1 << 15, "cuda": 1 << 22}
_WORDS_OF_A_BLOCK = 8  # of 64 bits
# Bits of a float64 from 1 to 2: 52 random ones, and the exponent of 1. Few CPUs convert integers to float64 as fast.
_FRACTION, _ONE = (1 << 52) - 1, 1023 << 52


def secret_normals(shape: Sequence[int], device: torch.device) -> Tensor:
    """Independent N(0, 1) values in float32, of ``shape`` on ``device``.

    Each pair comes from 128 bits of a cryptographic generator, by Box and Muller in float64 with 52 bits for each
    uniform number. On a CPU the generator is OpenSSL's, which the operating system seeds; on a GPU it is ChaCha20, with
    a fresh key of 256 bits from the operating system for each 2^23 values. For other devices the CPU draws.
    """
    drawn_on = device if device.type in _PAIRS else torch.device("cpu")
    values = torch.empty(math.prod(shape), dtype=torch.float32, device=drawn_on)
    at_once = _PAIRS[drawn_on.type] * (torch.get_num_threads() if drawn_on.type == "cpu" else 1)
    for block in values.split(2 * at_once) if len(values) else ():
        pairs = -(-len(block) // 2)
        words = _random_words(2 * pairs, drawn_on)
        uniform = words.bitwise_and_(_FRACTION).bitwise_or_(_ONE).view(torch.float64)  # [1, 2)
        radius = uniform[:pairs].neg_().add_(2).log_().mul_(-2).sqrt_()
        angle = uniform[pairs:].sub_(1.5).mul_(2 * math.pi)
        block[:pairs] = radius * angle.cos()
        block[pairs:] = (radius * angle.sin_())[: len(block) - pairs]
    return sent(values.view(tuple(shape)), device)


def _random_words(count: int, device: torch.device) -> Tensor:
    """Secret words of 64 random bits: (count,) int64."""
    if device.type == "cpu":
        return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * count)), dtype=torch.int64)
    return _of_key(secrets.token_bytes(KEY_BYTES), count, device)


def _of_key(key: bytes, count: int, device: torch.device) -> Tensor:
    return key_stream(key, -(-count // _WORDS_OF_A_BLOCK), device).flatten().view(torch.int64)[:count]
