"""Starts the ranks of a run as forks of the tests' process, so that a start costs no imports."""

import contextlib
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch


class Ended(NamedTuple):
    codes: list[int]
    stderr: str
    """Of all ranks, one after the other."""


def run_on_ranks(function, folder, size, *arguments, timeout=120):
    """Call ``function(*arguments)`` in ``size`` processes with the environment that ``torchrun`` gives them."""
    if torch.distributed.is_initialized():  # as a Trainer of an earlier test leaves it
        torch.distributed.destroy_process_group()
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [Path(folder) / f"stderr_{rank}.txt" for rank in range(size)]
    ranks = [
        context.Process(target=_one, args=(function, arguments, rank, size, port, files[rank])) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout)
    hanging = [process for process in ranks if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    assert not hanging, f"{len(hanging)} of {size} ranks did not end within {timeout} s"
    return Ended([process.exitcode for process in ranks], "".join(file.read_text() for file in files))


def _one(function, arguments, rank, size, port, stderr):
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(
            TORCHELASTIC_RUN_ID="tests",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
        )
    with open(stderr, "w") as file, contextlib.redirect_stderr(file):
        try:
            function(*arguments)
        except Exception:
            traceback.print_exc()
            file.flush()
            sys.stdout.flush()
            os._exit(1)  # a process group that has lost a rank cannot be taken down in order
