"""Which cores a process may use."""

import os

from joblib import cpu_count


def available_cores() -> int:
    """The cores that this process may use, or their number if a container has a share of more cores' time."""
    return int(cpu_count())


def respect_quota() -> None:
    """Let torch, which is not imported yet, take no more threads than a container has cores.

    OpenMP counts the cores of the machine. A container with a quota, such as by ``docker run --cpus 4``, would stand
    still for most of the time: all threads together use up its share early in each period.
    """
    cores = available_cores()
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < scheduled:
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
