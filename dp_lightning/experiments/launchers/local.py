"""Runs in processes on this machine, each on a device of its own."""

import os
import queue
import subprocess
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

from dp_lightning.cores import available_cores
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.launchers.options import failed, known_options
from dp_lightning.experiments.worker import run_to_its_end


def launch_local(folders: Sequence[str], options: Mapping[str, Any]) -> Generator[tuple[str, int], None, None]:
    """Run them at once, as many as there are jobs; the order of the results is that of their ends.

    When the iteration is broken off, every run is told to stop, leaves a checkpoint, and is waited for.

    Args:
        folders: of the runs.
        options: ``jobs``, runs at once, by default one for each GPU that this process may use, or one without GPU. A
            single run at once has all of them.

    Raises:
        ConfigurationError: for an option that it does not have, and for no job.
    """
    devices = _devices()
    jobs = known_options("local", options, {"jobs": max(1, len(devices))})["jobs"]
    if not isinstance(jobs, int) or jobs < 1:
        raise ConfigurationError(f"--jobs is {jobs}; give how many runs may run at once, at least 1.")
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for number in range(jobs):
        free.put(_share(devices, number, jobs))
    running: set[subprocess.Popen[bytes]] = set()
    stopping = Event()

    def note(process: subprocess.Popen[bytes]) -> None:
        running.add(process)
        if stopping.is_set():
            process.terminate()

    def run(folder: str) -> int:
        environment = free.get()
        try:
            return run_to_its_end(folder, environment, note, stopping.is_set)
        finally:
            free.put(environment)

    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(run, folder): folder for folder in folders}
        for future in as_completed(futures):
            folder, error = futures[future], future.exception()
            yield folder, failed(folder, error) if error else future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        stopping.set()
        for process in list(running):
            process.terminate()  # nothing where it has ended
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
