"""A function of many batches, computed on the CPU by a process for each core.

Threads wait for each other at the end of every operation, and a network that computes features has many small ones.
Processes wait only for their next batch (`benchmarks/features.py`). They read nothing: this process hands the images to
them, since readers that share an open file move each other's position in it.
"""

import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import wait
from typing import TypeAlias

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError

Function: TypeAlias = Callable[[Tensor], Tensor]

# What a process works on: the function, batches of images, and the places of its outputs.
_work: tuple[Function, Tensor, Sequence[Tensor]]


def processes(batches: int) -> int:
    """How many processes to share some batches among; 0 where this process alone is to compute them.

    They start as copies of this one, which other systems than Linux do not support once libraries have been loaded, and
    which a daemonic process, such as one of a ``multiprocessing.Pool``, is not allowed to do.
    """
    count = min(torch.get_num_threads(), batches)
    can = sys.platform == "linux" and not multiprocessing.current_process().daemon
    return count if can and count > 1 else 0


def shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in memory that is shared with processes that start as copies of this one.

    It needs no room in ``/dev/shm``, of which containers have little.
    """
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def applied(function: Function, batches: Iterable[Tensor], places: Sequence[Tensor], count: int) -> Iterator[None]:
    """Put a function of each batch into its place; yields after each.

    Args:
        function: of the images of a batch, (b, ...).
        batches: at least one; the first is the largest.
        places: parts of a `shared_tensor`, one for each batch.
        count: of processes.

    Raises:
        ConfigurationError: a process was killed.
    """
    with _one_thread():
        first = next(remaining := iter(batches))
        given = shared_tensor((2 * count, *first.shape), first.dtype)
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(function, given, places))
        begun: deque[Future[None]] = deque()
        try:
            for number, batch in zip(range(len(places)), chain([first], remaining), strict=True):
                if len(begun) == len(given):
                    begun.popleft().result()
                    yield
                given[number % len(given), : len(batch)] = batch
                begun.append(pool.submit(_compute, number, len(batch)))
            for future in begun:
                future.result()
                yield
        except BrokenProcessPool as error:
            raise ConfigurationError(
                "A process that computed features was killed, most likely since the memory was used up. Lower "
                "data.init_args.batch_size, or the number of processes by the environment variable OMP_NUM_THREADS. "
                "What was written before is kept."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads of this process would take the cores of the others, to copy batches and to wait for the next one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _begin(*work: object) -> None:
    global _work
    _work = work  # type: ignore[assignment]
    torch.set_num_threads(1)
    # This process ends with the one that started it, which alone answers to Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(process: multiprocessing.process.BaseProcess) -> None:
    wait([process.sentinel])
    os._exit(1)


def _compute(number: int, size: int) -> None:
    function, given, places = _work
    places[number].copy_(function(given[number % len(given), :size]))
