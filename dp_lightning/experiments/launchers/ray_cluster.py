"""Runs as actors of a Ray cluster."""

import logging
import subprocess
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.launchers.options import failed, known_options, missing_extra
from dp_lightning.experiments.worker import run_to_its_end

# For the checkpoints of runs that are stopped.
_SECONDS_TO_STOP = 60


def launch_ray(folders: Sequence[str], options: Mapping[str, Any]) -> Generator[tuple[str, int], None, None]:
    """Start them as actors; the order of the results is that of their ends.

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
    # Each run by what it is waited for: its place in the cluster, and then its end.
    placed: dict[Any, tuple[str, Any]] = {}
    running: dict[Any, tuple[str, Any]] = {}
    try:
        there = ray.cluster_resources()
        for name, number in needed.items():
            if number > there.get(name, 0):
                print(f"The Ray cluster has {there.get(name, 0):g} {name}, and each run needs {number:g}: they wait.")
        # Two calls at once: the run, and the word that stops it.
        remote: Any = ray.remote(_Run)
        actor = remote.options(num_cpus=chosen["num_cpus"], num_gpus=chosen["num_gpus"], max_concurrency=2)
        for folder in folders:
            run = actor.remote()
            placed[run.ready.remote()] = folder, run
        while placed or running:
            (done, *_), _ = ray.wait([*placed, *running])
            folder, run = placed[done] if done in placed else running[done]
            try:
                status = int(ray.get(done))
            except ray.exceptions.RayError as error:
                status = failed(folder, error)
            if done in placed and status == 0:
                running[run.to_its_end.remote(folder)] = folder, run
                del placed[done]
            else:
                placed.pop(done, None)
                running.pop(done, None)
                ray.kill(run)  # its place is free for the next one
                yield folder, status
    finally:
        for _, run in placed.values():
            if run not in [begun for _, begun in running.values()]:
                ray.kill(run)
        for _, run in running.values():
            run.stop.remote()
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=_SECONDS_TO_STOP)
        ray.shutdown()


class _Run:
    """A run as an actor: a task that is cancelled is not always told."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def ready(self) -> int:
        return 0

    def to_its_end(self, folder: str) -> int:
        return run_to_its_end(folder, started=self._started, stopping=lambda: self._stopping)

    def stop(self) -> None:
        self._stopping = True
        if self._process is not None:
            self._process.terminate()

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self._stopping:
            process.terminate()
