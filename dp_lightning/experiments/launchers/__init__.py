"""Where the runs of a grid run: each launcher takes folders of runs, and gives each of them back with its exit status.

A status other than 0 is that of ``dpl fit``, or -1 where the machinery around it has failed. A run that fails does not
stop the others.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from dp_lightning.experiments.launchers.local import launch_local
from dp_lightning.experiments.launchers.ray_cluster import launch_ray
from dp_lightning.experiments.launchers.slurm import launch_slurm

Launcher = Callable[[Sequence[str], Mapping[str, Any]], Generator[tuple[str, int], None, None]]

LAUNCHERS: dict[str, Launcher] = {"local": launch_local, "slurm": launch_slurm, "ray": launch_ray}

__all__ = ["LAUNCHERS", "Launcher"]
