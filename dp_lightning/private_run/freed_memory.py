"""Keeps freed memory in the process between training steps on a CPU.

The GNU C library returns large blocks to the operating system when they are freed, and the first touch of a fresh page
costs more than most arithmetic on it. The next training step needs the same blocks again at once. GPU memory is kept
by its own allocator.
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory for the next allocations.

    The peak stays about the same; between peaks the process does not give memory back.

    Returns:
        Whether it was told. It is not told if it is not glibc, or if the environment sets one of these limits
        (``MALLOC_TRIM_THRESHOLD_`` and the like, see mallopt(3), or ``glibc.malloc`` in ``GLIBC_TUNABLES``).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in _CHOSEN_BY_USER) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Blocks of any size come from the heap, whose end is never given back.
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
