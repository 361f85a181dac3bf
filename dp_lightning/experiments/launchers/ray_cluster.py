"""Runs as tasks of a Ray cluster."""

import logging
import subprocess
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.launchers.options import failed, known_options, missing_extra
from dp_lightning.experiments.worker import run_to_its_end

_POLL_SECONDS = 0.5
# For the checkpoints of runs that are stopped.
_SECONDS_TO_STOP = 60


def launch_ray(folders: Sequence[str], options: Mapping[str, Any]) -> Generator[tuple[str, int], None, None]:
    """Start them as tasks; the order of the results is that of their ends.

    When the iteration is broken off, every run is told to stop, leaves a checkpoint, and is waited for.

    Args:
        folders: of the runs, on a file system that the nodes share.
        options: ``address`` of a running cluster, by default the one that RAY_ADDRESS names or else one of this
            machine's cores and GPUs; ``num_cpus`` and ``num_gpus`` of each run, by default 1 and 0.

    Raises:
        ConfigurationError: where ray is not installed, an option is not one, or no cluster is at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray") from error
    chosen = known_options("ray", options, {"address": None, "num_cpus": 1, "num_gpus": 0})
    needed = {"CPU": chosen["num_cpus"], "GPU": chosen["num_gpus"]}
    for name, number in needed.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or number < 0:
            raise ConfigurationError(f"--launcher-option num_{name.lower()}s={number}: give a number, such as 1.")
    try:
        ray.init(address=chosen["address"], include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--launcher-option address={chosen['address']}: {error}") from error
    waiting: dict[Any, str] = {}
    try:
        there = ray.cluster_resources()
        for name, number in needed.items():
            if number > there.get(name, 0):
                print(f"The Ray cluster has {there.get(name, 0):g} {name}, and each run needs {number:g}: they wait.")
        task = ray.remote(num_cpus=chosen["num_cpus"], num_gpus=chosen["num_gpus"], max_retries=0)(_run)
        waiting |= {task.remote(folder): folder for folder in folders}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting))
            folder = waiting.pop(done)
            try:
                status = int(ray.get(done))
            except ray.exceptions.RayError as error:
                status = failed(folder, error)
            yield folder, status
    finally:
        for left in waiting:
            ray.cancel(left)
        if waiting:
            ray.wait(list(waiting), num_returns=len(waiting), timeout=_SECONDS_TO_STOP)
        ray.shutdown()


def _run(folder: str) -> int:
    """The run as a task, which stops it where the task is cancelled."""
    running: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run_to_its_end, folder, started=running.append)
        try:
            # Cancelling raises between two instructions, and a wait without end has none.
            while not wait([future], timeout=_POLL_SECONDS).done:
                pass
            return future.result()
        except BaseException:
            for process in running:
                process.terminate()
            raise
