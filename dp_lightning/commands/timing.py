"""The time of a configuration's private steps on this machine, from a few steps on synthetic images."""

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from dp_lightning.commands.synthetic_fit import fit_on_synthetic_images

# Images of the first steps that are timed, or fewer if the run's physical batches are smaller.
_IMAGES = 16
# Seconds of a step at which it is long enough: in shorter ones Python takes most of the time.
_LONG_ENOUGH = 0.5
_STEPS = 3


def seconds_per_example(settings: Mapping[str, Any]) -> float | None:
    """Seconds of a private step for each of its examples: those of a full physical batch, or of fewer in a long step.

    The whole step counts, on one device: reading examples, clipped gradients, journal, noise, post-processing and the
    optimizer. Image files, evaluations and checkpoints come on top.

    Args:
        settings: a whole configuration.

    Returns:
        None if the module cannot take synthetic images.
    """
    privacy, views = settings["privacy"], settings["privacy"]["augmult"]
    # A person is timed as so many examples: synthetic images belong to nobody.
    plain = {**privacy, "unit_of_privacy": "example", "images_per_group": None}
    one_device = {**settings["trainer"], "devices": 1, "num_nodes": 1, "strategy": "auto"}
    timed = {**settings, "privacy": plain, "trainer": one_device}
    most = max(privacy["max_physical_batch_size"] // views, 1)
    examples = min(max(_IMAGES // views, 1), most)
    try:
        while (seconds := _seconds_of_step(timed, examples)) < _LONG_ENOUGH and examples < most:
            examples = min(4 * examples, most)
    except Exception:  # the user's own code may raise anything on synthetic images
        return None
    return seconds / examples * (privacy.get("images_per_group") or 1)


def _seconds_of_step(settings: Mapping[str, Any], examples: int) -> float:
    """The fastest of the steps after the first one."""
    moments: list[float] = []
    fit_on_synthetic_images(
        settings,
        lambda module, own: lambda batch: own(batch[0]),
        lambda generator: (torch.arange(examples),),
        lambda step, sums: moments.append(time.perf_counter()),
        examples=examples,
        steps=_STEPS,
        noise_multiplier=1.0,
    )
    return min(after - before for before, after in pairwise(moments))
