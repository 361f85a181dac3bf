"""What a run costs, before it starts: epsilon, noise, steps, and an estimate of its time on this machine."""

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from dp_lightning.commands.fit_settings import prepare_to_train
from dp_lightning.commands.synthetic_fit import fit_on_synthetic_images
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.private_run.settings import PrivacySettings

# Runs that differ only in these settings of ``privacy`` and ``trainer``, in the optimizer or in the seed are built and
# timed once.
_NUMBERS = ("expected_batch_size", "target_epsilon", "noise_multiplier", "reproducible", "max_epochs", "max_steps")
# Images of the first steps that are timed, or fewer if the run's physical batches are smaller.
_IMAGES = 16
# Seconds of a step at which it is long enough: in shorter ones Python takes most of the time.
_LONG_ENOUGH = 0.5
_STEPS = 3


class Pricing:
    """Prices runs; what they have in common is built and timed once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float | None]] = {}

    def __call__(self, settings: Mapping[str, Any]) -> tuple[PrivacyPlan, float | None]:
        """The plan of a run with this whole configuration, and the seconds of its training steps on this machine.

        The seconds are estimated from a few steps on synthetic images; None if the model cannot take them.

        Raises:
            DpLightningError: as ``dpl fit`` would, for wrong settings or data.
        """
        groups = {group: settings.get(group, {}) for group in ("model", "data", "postprocess", "privacy", "trainer")}
        shared = [{name: value for name, value in group.items() if name not in _NUMBERS} for group in groups.values()]
        if (key := json.dumps(shared, sort_keys=True, default=str)) not in self._known:
            _, num_train = prepare_to_train(settings)
            self._known[key] = num_train, seconds_per_example(settings)
        num_train, seconds = self._known[key]
        plan = plan_of(settings["privacy"], settings["trainer"], num_train=num_train)
        return plan, None if seconds is None else seconds * plan.num_steps * plan.expected_batch_size


def plan_of(
    privacy: Mapping[str, Any], trainer: Mapping[str, Any], *, num_train: int, batch_size: int | None = None
) -> PrivacyPlan:
    """The plan that a run with these settings makes when it starts.

    Args:
        privacy, trainer: groups of its configuration; settings that are null may be absent.
        num_train: N.
        batch_size: B, if not the run's own.

    Raises:
        ConfigurationError: as ``dpl fit`` would, for impossible numbers.
    """
    names = ("target_epsilon", "noise_multiplier", "delta", "accountant")
    given: dict[str, Any] = {name: privacy.get(name) for name in names} | {"bands": privacy.get("bands") or 1}
    if (schedule := privacy.get("noise_schedule")) is not None:
        given["noise_schedule"] = Schedule(**schedule)
    size = privacy["expected_batch_size"] if batch_size is None else batch_size
    run = PrivacySettings(size, **given, not_private=bool(privacy.get("not_private")))
    limits = {"max_epochs": trainer.get("max_epochs"), "max_steps": trainer["max_steps"]}
    if (limit := trainer.get("limit_train_batches")) is not None:
        limits["limit_train_batches"] = limit
    return run.make_plan(run.shape_of(num_train, **limits))


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
    """Seconds of the fastest step after the first one."""
    moments: list[float] = []
    fit_on_synthetic_images(
        settings,
        releases=lambda step, sums: moments.append(time.perf_counter()),
        examples=examples,
        steps=_STEPS,
        noise_multiplier=1.0,
    )
    return min(after - before for before, after in pairwise(moments))
