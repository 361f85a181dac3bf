"""One run of a grid: its folder, whether it is finished, and the process that runs it to its end.

    <out>/<labels>-<id>/run.yaml    the whole configuration of ``dpl fit``
                        run/        its default_root_dir
                        log.txt     its output

The id is a hash of the configuration, so that runs with different settings have different folders.
"""

import copy
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from dp_lightning.atomic_files import replacing
from dp_lightning.foreign_text import read_json

# Characters of the labels; file systems allow names of up to 255 bytes.
_LONGEST = 60
_POLL_SECONDS = 0.5
_DPL = (sys.executable, "-m", "dp_lightning")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.root, self.log = path / "run.yaml", path / "run", path / "log.txt"

    @classmethod
    def of(cls, out: Path, name: str, settings: Mapping[str, Any]) -> "RunFolder":
        """The folder of a run with these settings.

        Args:
            name: Readable name; characters that are special to a file system or a shell are replaced.
            settings: The whole configuration, without ``trainer.default_root_dir``.
        """
        text = json.dumps(settings, sort_keys=True, default=str)
        plain = re.sub(r"[^\w.+=-]", "-", name)[:_LONGEST]
        return cls(out.resolve() / f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Write the configuration of the run, whose files all go into this folder."""
        trainer = {**copy.deepcopy(settings["trainer"]), "default_root_dir": str(self.root)}
        for kind in ("logger", "callbacks"):
            given = trainer.get(kind)
            for one in given if isinstance(given, list) else [given]:
                options = one.get("init_args", {}) if isinstance(one, dict) else {}
                options.pop("dirpath", None)  # of checkpoints: without it they are in the log folder
                if "save_dir" in options:
                    options["save_dir"] = str(self.root)
        with replacing(self.config) as file:
            file.write(yaml.safe_dump({**settings, "trainer": trainer}, sort_keys=False).encode())

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of the finished attempt, or else of the longest one; None if there is none.

        It has the content of ``result.json``, and under ``release`` what the statement says about a release.
        """
        found = []
        for path in self.root.rglob("result.json"):
            facts = facts_in(path.with_name("privacy_statement.json"))
            release = facts.get("release", "not for release: there is no privacy statement")
            found.append({**facts_in(path), "release": release})
        return max(found, key=lambda one: (one["completed"], one["num_steps"]), default=None)

    @property
    def finished(self) -> bool:
        """Whether the run is finished: all steps are taken, or a setting has ended it early."""
        return (result := self.result) is not None and result["completed"]

    @property
    def abandoned(self) -> int:
        """Number of attempts that were set aside; see `abandon`."""
        return len(list(self.path.glob("abandoned_*")))

    def abandon(self) -> None:
        """Set aside the files of an attempt that left no checkpoint, so that the run starts again.

        The attempt's steps used the data, but the run's epsilon does not count them, so none of these files may be
        released.
        """
        if self.root.exists():
            self.root.rename(self.path / f"abandoned_{self.abandoned}")


def facts_in(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a run; empty if the run has not written it."""
    return read_json(path) if path.is_file() else {}


class RunProcess:
    """The process of a run, which another thread can stop."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def to_its_end(self, folder: str, environment: Mapping[str, str] | None = None) -> int:
        """Start ``dpl fit``, or resume it from its last checkpoint; do nothing if it is finished.

        The process of the run inherits the lock. If the process that started it dies, another one that wants to start
        the same run waits for it instead of starting it twice.

        Args:
            folder: Folder of the run, with its configuration.
            environment: Variables of the run, in addition to those of this process.

        Returns:
            The exit status of the run; 0 if it was already finished.
        """
        run = RunFolder(Path(folder))
        with (run.path / "lock").open("w") as lock, run.log.open("ab") as log:
            if not _take(lock):
                print(f"{run.path.name}: another process is already running it; waiting for it to end", flush=True)
                while not self._stopped and not _take(lock):
                    time.sleep(_POLL_SECONDS)
            if self._stopped:
                return -signal.SIGTERM
            if run.finished:
                return 0
            command = [*_DPL, "fit", "--config", str(run.config)]
            if any(run.root.rglob("*.ckpt")):
                command += ["--ckpt_path", "last"]
            else:
                run.abandon()
            # SLURM sends submitit's warning to every process of the job; it would kill the run before its checkpoint.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            try:
                self.process = subprocess.Popen(
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
            if self._stopped:
                self.stop()
            return self.process.wait()

    def stop(self) -> None:
        """Tell the run to save a checkpoint and end, or never to start."""
        self._stopped = True
        if self.process is not None:
            self.process.terminate()  # nothing where it has ended


def _take(lock: IO[str]) -> bool:
    """Take the lock of a run; false where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
