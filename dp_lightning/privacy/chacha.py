"""ChaCha20 on any device of torch (Bernstein 2008; RFC 8439): a cryptographic generator with a key of 256 bits.

All blocks are computed at once. A word is an int32, whose sums wrap around; its shift to the right keeps the sign.
"""

import torch
from torch import Tensor

from dp_lightning.processors import sent

KEY_BYTES = 32
_CONSTANTS = b"expand 32-byte k"
_ROUNDS = 20


def key_stream(key: bytes, blocks: int, device: torch.device, *, counter: int = 0, nonce: bytes = bytes(12)) -> Tensor:
    """The key stream: (blocks, 16) int32, the little-endian words of 64 bytes each.

    Args:
        key: 32 bytes. Whoever knows it can repeat the stream.
        blocks: number of blocks.
        device: on which the stream is computed.
        counter: counter of the first block; the counters of all blocks are below 2^32.
        nonce: 12 bytes.
    """
    fixed = sent(torch.frombuffer(bytearray(_CONSTANTS + key + bytes(4) + nonce), dtype=torch.int32), device)
    start = fixed.unsqueeze(1).repeat(1, blocks)
    start[12] = torch.arange(counter, counter + blocks, device=device).to(torch.int32)
    state = start.clone()
    a, b, c, d = state.split(4)
    spare = torch.empty_like(a)
    for _ in range(_ROUNDS // 2):
        _quarter_rounds(a, b, c, d, spare)  # of the columns
        for rows, places in ((b, 1), (c, 2), (d, 3)):
            rows.copy_(rows.roll(-places, 0))
        _quarter_rounds(a, b, c, d, spare)  # of the diagonals
        for rows, places in ((b, 1), (c, 2), (d, 3)):
            rows.copy_(rows.roll(places, 0))
    return state.add_(start).T.contiguous()


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor, spare: Tensor) -> None:
    """Four at once in place, of words (4, blocks)."""
    for into, by, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        mixed.bitwise_xor_(into.add_(by))
        torch.bitwise_right_shift(mixed, 32 - bits, out=spare)
        mixed.bitwise_left_shift_(bits).bitwise_or_(spare.bitwise_and_((1 << bits) - 1))
