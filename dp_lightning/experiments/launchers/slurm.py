"""Runs as one array of SLURM jobs, through submitit."""

import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.launchers.options import failed, missing_extra
from dp_lightning.experiments.worker import run_to_its_end

# What is left of submitit's 90 seconds of warning for the checkpoint.
_SECONDS_TO_STOP = 60
# It looks at files; SLURM itself is asked less often.
_POLL_SECONDS = 2


class _Job:
    """A run that resumes when SLURM has taken its machine away or its time is up."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, folder: str) -> int:
        return run_to_its_end(folder, started=self._note)

    def _note(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def checkpoint(self, folder: str) -> Any:
        """Called by submitit on the signal before the end: stop the run with a checkpoint, and queue it again."""
        import submitit

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return submitit.helpers.DelayedSubmission(_Job(), folder)


def launch_slurm(folders: Sequence[str], options: Mapping[str, Any]) -> Generator[tuple[str, int], None, None]:
    """Submit them as one array and wait for them; breaking it off leaves the jobs in the queue.

    Args:
        folders: of the runs, on a file system that the nodes share.
        options: ``cluster``, None for the one of this machine or ``local`` for processes here; ``jobs``, runs at once;
            every other one goes to
            submitit's ``AutoExecutor.update_parameters``, such as ``slurm_partition``, ``timeout_min``,
            ``gpus_per_node``, ``cpus_per_task`` and ``slurm_array_parallelism``.

    Raises:
        ConfigurationError: where submitit is not installed, or does not take an option, or there is no SLURM.
    """
    try:
        import submitit
    except ImportError as error:
        raise missing_extra("slurm", "submitit") from error
    given = {"name": "dpl-sweep", **options}
    cluster = given.pop("cluster", None)
    if "jobs" in given:
        given["slurm_array_parallelism"] = given.pop("jobs")
    if cluster is None and submitit.AutoExecutor.which() != "slurm":
        raise ConfigurationError(
            "--launcher slurm: there is no SLURM on this machine. Start the sweep where sbatch is, or give "
            "--launcher-option cluster=local to try it with processes here, all of them at once."
        )
    try:
        logs = Path(folders[0]).parent / "slurm"
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(**given)
        with executor.batch():
            submitted = [executor.submit(_Job(), folder) for folder in folders]
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        raise ConfigurationError(f"--launcher slurm: {error}") from error
    folder_of = {job.job_id: folder for job, folder in zip(submitted, folders, strict=True)}
    for job in submitit.helpers.as_completed(submitted, poll_frequency=_POLL_SECONDS):
        folder, problem = folder_of[job.job_id], job.exception()
        yield folder, failed(folder, problem) if problem else job.result()
