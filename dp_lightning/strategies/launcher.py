"""Starts the other ranks of a machine, and ends each of them when the rank that started it ends.

If a rank dies during the start of a run, the ranks that wait for it would wait for the timeout of a collective, half an
hour. Lightning's launcher watches the ranks that it has started; here they also watch the rank that started them.
"""

import os
import select
import sys
import threading
import time
from contextlib import suppress

# The process id of the rank that has started this one.
_STARTED_BY = "DPL_STARTED_BY"
# Time for a rank to end by itself, with an error of its own.
_SECONDS = 10.0


def be_starter() -> None:
    """Let the processes that this one starts know its id, unless it has been started as another local rank itself."""
    if "LOCAL_RANK" not in os.environ:
        os.environ[_STARTED_BY] = str(os.getpid())


def starter_of(local_rank: int) -> int | None:
    """The process id of the rank that started this one; None if torchrun or the like did, and for local rank 0."""
    starter = os.environ.get(_STARTED_BY)
    return None if starter in (None, str(os.getpid())) or local_rank == 0 else int(starter)


def end_with(process: int) -> None:
    """End this process once another one on this machine has ended."""
    threading.Thread(target=_watch, args=(process,), name="starter-observer", daemon=True).start()


def _watch(process: int) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        _wait_for_end(process)
    time.sleep(_SECONDS)
    print("The rank that started this one has ended, so this one ends too.", file=sys.stderr, flush=True)
    os._exit(1)


def _wait_for_end(process: int) -> None:
    if not hasattr(os, "pidfd_open"):  # not on Linux
        while os.getppid() == process:
            time.sleep(1.0)
        return
    descriptor = os.pidfd_open(process)
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.close(descriptor)
