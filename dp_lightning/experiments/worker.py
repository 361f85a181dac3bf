"""Runs one run to its end in its own process, which is what every launcher does with it."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from dp_lightning.experiments.runs import RunFolder

_POLL_SECONDS = 0.5
_DPL = (sys.executable, "-m", "dp_lightning")


def run_to_its_end(
    folder: str,
    environment: Mapping[str, str] | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Start ``dpl fit``, or resume it from its last checkpoint; do nothing if it is finished.

    The process of the run inherits the lock. If the process that started it dies, another one that wants to start the
    same run waits for it instead of starting it twice.

    Args:
        folder: of the run, with its configuration.
        environment: variables of the run, in addition to those of this process.
        started: called with the run's process.
        stopping: called repeatedly while another process runs the same run; true ends the wait.

    Returns:
        Its exit status; 0 if it was already finished.
    """
    run = RunFolder(Path(folder))
    with (run.path / "lock").open("w") as lock, run.log.open("ab") as log:
        if not _locked(lock, run, stopping):
            return -signal.SIGTERM
        if run.finished:
            return 0
        command = [*_DPL, "fit", "--config", str(run.config)]
        if run.checkpoint is None:
            run.abandon()
        else:
            command += ["--ckpt_path", "last"]
        # SLURM sends submitit's warning to every process of the job; it would kill the run before its checkpoint.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                pass_fds=[lock.fileno()],
                # Ctrl-C reaches only the launcher, which stops its runs cleanly.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if started is not None:
            started(process)
        return process.wait()


def _locked(lock: IO[str], run: RunFolder, stopping: Callable[[], bool]) -> bool:
    """Wait for the run's lock; false if the wait was ended."""
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if stopping():
                return False
            if not said:
                text = f"{run.path.name}: another process is already running it; waiting for it to end"
                print(text, file=sys.stderr, flush=True)
                said = True
            time.sleep(_POLL_SECONDS)
