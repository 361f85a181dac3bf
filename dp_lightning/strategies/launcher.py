"""Ends each rank of a machine when the rank that started it ends.

If a rank dies during the start of a run, the ranks that wait for it would wait for the timeout of a collective, half an
hour. Lightning's launcher watches the ranks that it has started; here they also watch the rank that started them.
"""

import os
import select
import sys
import threading
import time
from contextlib import suppress

# The process id of the rank that starts the others, which inherit it.
_STARTED_BY = "DPL_STARTED_BY"
# Time for a rank to end by itself, with an error of its own.
_SECONDS = 10.0


def note_starter() -> None:
    """Called where a strategy is made: local rank 0 passes its process id to the ranks that it will start."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.environ[_STARTED_BY] = str(os.getpid())


def starter_of(local_rank: int) -> int | None:
    """The process id of the rank that started this one; None if torchrun or the like did, and for local rank 0."""
    starter = int(os.environ.get(_STARTED_BY, os.getpid()))
    return None if local_rank == 0 or starter == os.getpid() else starter


def end_with(process: int) -> None:
    """End this process once another one on this machine has ended."""
    threading.Thread(target=_watch, args=(process,), name="starter-observer", daemon=True).start()


def _watch(process: int) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        if hasattr(os, "pidfd_open"):
            ended = select.poll()
            ended.register(os.pidfd_open(process), select.POLLIN)
            ended.poll()
        else:  # not on Linux
            while os.getppid() == process:
                time.sleep(1.0)
    time.sleep(_SECONDS)
    print("The rank that started this one has ended, so this one ends too.", file=sys.stderr, flush=True)
    os._exit(1)
