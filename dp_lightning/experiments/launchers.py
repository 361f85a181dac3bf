"""Where the runs of a grid run: each launcher takes folders of runs, and gives each of them back with its exit status.

A status other than 0 is that of ``dpl fit``, or -1 where the machinery around it has failed. A run that fails does not
stop the others.
"""

import logging
import os
import queue
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.cores import available_cores
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.runs import RunProcess

Results = Generator[tuple[str, int], None, None]
"""Folders of runs with their exit statuses, in the order of their ends."""

# Time for the checkpoints of runs that are stopped; submitit warns 90 seconds before the end.
_SECONDS_TO_STOP = 60
# submitit looks at files; SLURM itself is asked less often.
_POLL_SECONDS = 2


def launch_local(folders: Sequence[str], options: Mapping[str, Any]) -> Results:
    """Runs in processes on this machine, as many at once as there are jobs.

    When the iteration is broken off, every run is told to stop, leaves a checkpoint, and is waited for.

    Args:
        folders: Folders of the runs.
        options: ``jobs``, the number of runs at once, by default one for each GPU that this process may use, or one
            without GPU. A single run at once has all GPUs.

    Raises:
        ConfigurationError: for an option that this launcher lacks, and for no job.
    """
    devices = _devices()
    jobs = _with_defaults("local", options, {"jobs": max(1, len(devices))})["jobs"]
    if jobs < 1:
        raise ConfigurationError(f"--jobs is {jobs}; give how many runs may run at once, at least 1.")
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for number in range(jobs):
        free.put(_share(devices, number, jobs))
    runs = {folder: RunProcess() for folder in folders}

    def run(folder: str) -> int:
        environment = free.get()
        try:
            return runs[folder].to_its_end(folder, environment)
        finally:
            free.put(environment)

    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(run, folder): folder for folder in folders}
        for future in as_completed(futures):
            folder, error = futures[future], future.exception()
            yield folder, _failed(folder, error) if error else future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in runs.values():
            process.stop()
        pool.shutdown()


def _share(devices: Sequence[str], number: int, jobs: int) -> dict[str, str]:
    """What the runs of one of the jobs see: one GPU, or their share of the cores."""
    if jobs == 1:
        return {}
    if devices:
        return {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // jobs))}


def _devices() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name and name != "-1"]
    names = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((name for name in names if name.isdigit()), key=int)


class _SlurmJob(RunProcess):
    """A run that resumes when SLURM has taken its machine away or its time is up."""

    def __call__(self, folder: str) -> int:
        return self.to_its_end(folder)

    def checkpoint(self, folder: str) -> Any:
        """Called by submitit on the signal before the end: stop the run with a checkpoint, and queue it again."""
        import submitit

        self.stop()
        if self.process is not None:
            try:
                self.process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return submitit.helpers.DelayedSubmission(_SlurmJob(), folder)


def launch_slurm(folders: Sequence[str], options: Mapping[str, Any]) -> Results:
    """Runs as one array of SLURM jobs; breaking off the iteration leaves the jobs in the queue.

    Args:
        folders: Folders of the runs, on a file system that the nodes share.
        options: ``cluster``, None for that of this machine or ``local`` for processes here; ``jobs``, the number of
            runs at once; every other option goes to submitit's ``AutoExecutor.update_parameters``, such as
            ``slurm_partition``, ``timeout_min``, ``gpus_per_node``, ``cpus_per_task`` and ``slurm_array_parallelism``.

    Raises:
        ConfigurationError: where submitit is not installed, or does not take an option, or there is no SLURM.
    """
    try:
        import submitit
    except ImportError as error:
        raise ConfigurationError("--launcher slurm needs submitit: pip install 'dp-lightning[slurm]'") from error
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
        executor = submitit.AutoExecutor(folder=Path(folders[0]).parent / "slurm", cluster=cluster)
        executor.update_parameters(**given)
        with executor.batch():
            submitted = [executor.submit(_SlurmJob(), folder) for folder in folders]
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        raise ConfigurationError(f"--launcher slurm: {error}") from error
    folder_of = {job.job_id: folder for job, folder in zip(submitted, folders, strict=True)}
    for job in submitit.helpers.as_completed(submitted, poll_frequency=_POLL_SECONDS):
        folder, problem = folder_of[job.job_id], job.exception()
        yield folder, _failed(folder, problem) if problem else job.result()


def launch_ray(folders: Sequence[str], options: Mapping[str, Any]) -> Results:
    """Runs as actors of a Ray cluster, since a task that is cancelled is not always told.

    When the iteration is broken off, every run is told to stop, leaves a checkpoint, and is waited for.

    Args:
        folders: Folders of the runs, on a file system that the nodes share.
        options: ``address`` of a running cluster, by default the one that RAY_ADDRESS names or else a new one with this
            machine's cores and GPUs; ``num_cpus`` and ``num_gpus`` of each run, by default 1 and 0.

    Raises:
        ConfigurationError: where ray is not installed, an option is unknown, or no cluster is at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("--launcher ray needs ray: pip install 'dp-lightning[ray]'") from error
    chosen = _with_defaults("ray", options, {"address": None, "num_cpus": 1, "num_gpus": 0})
    address = chosen.pop("address")
    try:
        ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--launcher-option address={address}: {error}") from error
    running: dict[Any, tuple[str, Any, Any]] = {}
    try:
        # Two calls at once: the run, and the word that stops it.
        remote: Any = ray.remote(RunProcess)
        for folder in folders:
            run = remote.options(**chosen, max_concurrency=2).remote()
            running[run.to_its_end.remote(folder)] = folder, run, run.__ray_ready__.remote()
        while running:
            (done, *_), _ = ray.wait(list(running))
            folder, run, _ = running.pop(done)
            try:
                status = int(ray.get(done))
            except ray.exceptions.RayError as error:
                status = _failed(folder, error)
            ray.kill(run)  # its place is free for the next one
            yield folder, status
    finally:
        for done, (_, run, placed) in list(running.items()):
            if ray.wait([placed], timeout=0)[0]:
                run.stop.remote()
            else:
                ray.kill(run)
                del running[done]
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=_SECONDS_TO_STOP)
        ray.shutdown()


def _with_defaults(launcher: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in defaults:
            raise ConfigurationError(
                f"--launcher {launcher} has no option {name}; it has {', '.join(sorted(defaults))}."
            )
    return {**defaults, **given}


def _failed(folder: str, error: BaseException | None) -> int:
    """The status of a run around which the machinery has failed; says why."""
    print(f"{folder}: {error}", file=sys.stderr, flush=True)
    return -1


LAUNCHERS = {"local": launch_local, "slurm": launch_slurm, "ray": launch_ray}


@contextmanager
def launched(
    folders: Sequence[str], launcher: str, given: Sequence[str], jobs: int | None
) -> Iterator[Iterable[tuple[str, int]]]:
    """Run what is in these folders, by a launcher with options NAME=VALUE; gives each with its status as it ends."""
    options: dict[str, Any] = {} if jobs is None else {"jobs": jobs}
    options |= {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in given)}
    # Closing the results stops the runs, so they are closed whatever interrupts the loop, a signal too.
    with closing(LAUNCHERS[launcher](folders, options)) as results:
        yield results if folders else ()
