"""Runs as tasks of a Ray cluster."""

import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from dp_lightning.experiments.launchers.options import known_options, missing_extra
from dp_lightning.experiments.worker import run_to_its_end


def launch_ray(folders: Sequence[str], options: Mapping[str, Any]) -> Generator[tuple[str, int], None, None]:
    """Start them as tasks; the order of the results is that of their ends.

    Args:
        folders: of the runs, on a file system that the nodes share.
        options: ``address`` of a running cluster, by default the one that RAY_ADDRESS names or else one of this
            machine's cores and GPUs; ``num_cpus`` and ``num_gpus`` of each run, by default 1 and 0.

    Raises:
        ConfigurationError: where ray is not installed, or has no such option.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray") from error
    chosen = known_options("ray", options, {"address": None, "num_cpus": 1, "num_gpus": 0})
    ray.init(address=chosen["address"], include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=chosen["num_cpus"], num_gpus=chosen["num_gpus"], max_retries=0)(run_to_its_end)
        waiting = {task.remote(folder): folder for folder in folders}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting))
            try:
                status = int(ray.get(done))
            except ray.exceptions.RayError:
                status = -1
            yield waiting.pop(done), status
    finally:
        ray.shutdown()
