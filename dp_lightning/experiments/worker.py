"""Brings one run to its end, in a process of its own: the one thing that every launcher does with it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dp_lightning.experiments.runs import RunFolder

_DPL = (sys.executable, "-m", "dp_lightning")


def run_to_its_end(
    folder: str,
    environment: Mapping[str, str] | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> int:
    """Start ``dpl fit``, or go on from its last checkpoint; nothing where it is finished.

    The lock is handed to the process of the run: where the one that has started it dies, another one that comes to the
    same run waits for it instead of starting it twice.

    Args:
        folder: of the run, with its configuration.
        environment: variables of the run beside those of this process.
        started: gets the run's process.

    Returns:
        Its exit status; 0 where it was finished already.
    """
    run = RunFolder(Path(folder))
    with (run.path / "lock").open("w") as lock, run.log.open("ab") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if run.finished:
            return 0
        command = [*_DPL, "fit", "--config", str(run.config)]
        if run.has_checkpoint:
            command += ["--ckpt_path", "last"]
        else:
            run.abandon()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            pass_fds=[lock.fileno()],
            # Ctrl-C reaches the launcher alone, which ends its runs in order.
            start_new_session=True,
        )
        if started is not None:
            started(process)
        return process.wait()
