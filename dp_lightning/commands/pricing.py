"""What a run costs, before it starts: epsilon, noise, steps, and an estimate of its time on this machine."""

import json
import math
from collections.abc import Mapping
from typing import Any

from dp_lightning.commands.composition import prepare_to_train
from dp_lightning.commands.timing import seconds_per_example
from dp_lightning.errors import DpLightningError
from dp_lightning.privacy.plan import PrivacyPlan, RunShape
from dp_lightning.private_run.settings import PrivacySettings

# Runs that differ only in these are accepted or refused together.
_NUMBERS = {
    "privacy": ("expected_batch_size", "target_epsilon", "noise_multiplier", "reproducible"),
    "trainer": ("max_epochs", "max_steps"),
}
# On which of ``privacy`` the time of an example depends.
_TIMED = ("augmult", "clipping", "disk", "examples", "images_per_group", "max_physical_batch_size")


class Pricing:
    """Prices runs; what they have in common is built and timed once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float | None] | DpLightningError] = {}
        self._seconds_per_example: dict[str, float | None] = {}

    def __call__(self, settings: Mapping[str, Any]) -> tuple[PrivacyPlan, float | None]:
        """The plan of a run with this whole configuration, and the seconds of its training steps on this machine.

        The seconds are estimated from a few steps on synthetic images; None if the model cannot take them.

        Raises:
            DpLightningError: as ``dpl fit`` would, for wrong settings or data.
        """
        key = _key(_without_numbers(settings))
        if key not in self._known:
            self._known[key] = self._look_at(settings)
        known = self._known[key]
        if isinstance(known, DpLightningError):
            raise known
        num_train, per_example = known
        plan = plan_of(settings["privacy"], settings["trainer"], num_train=num_train)
        return plan, None if per_example is None else per_example * plan.num_steps * plan.expected_batch_size

    def _look_at(self, settings: Mapping[str, Any]) -> tuple[int, float | None] | DpLightningError:
        """N and the seconds per example, or the error with which ``dpl fit`` would refuse the run."""
        try:
            _, num_train = prepare_to_train(settings)
        except DpLightningError as error:
            return error
        shared = {name: settings["privacy"].get(name) for name in _TIMED}
        shared |= {name: settings.get(name) for name in ("model", "data", "postprocess")}
        key = _key({**shared, "precision": settings["trainer"].get("precision")})
        if key not in self._seconds_per_example:
            self._seconds_per_example[key] = seconds_per_example(settings)
        return num_train, self._seconds_per_example[key]


def _without_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide whether a run is refused."""
    rest = {key: value for key, value in settings.items() if key != "seed_everything"}
    for group, names in _NUMBERS.items():
        rest[group] = {name: value for name, value in settings[group].items() if name not in names}
    optimizer = rest.get("optimizer") or {}
    rate = (optimizer.get("init_args") or {}).get("lr")
    # Those of PyTorch refuse negative rates alone.
    if str(optimizer.get("class_path")).startswith("torch.optim.") and isinstance(rate, float) and 0 < rate < math.inf:
        rest["optimizer"] = {**optimizer, "init_args": {**optimizer["init_args"], "lr": 1.0}}
    return rest


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


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
    given: dict[str, Any] = {
        name: privacy.get(name) for name in ("target_epsilon", "noise_multiplier", "delta", "accountant")
    }
    size = privacy["expected_batch_size"] if batch_size is None else batch_size
    run = PrivacySettings(size, **given, not_private=bool(privacy.get("not_private")))
    shape = RunShape.of_length(num_train=num_train, expected_batch_size=size, delta=run.delta, **length_of(trainer))
    return run.make_plan(shape)


def length_of(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """What limits the steps of a run with this group ``trainer``, as `RunShape.of_length` takes it."""
    limit = trainer.get("limit_train_batches")
    return {
        "max_epochs": trainer.get("max_epochs"),
        "max_steps": trainer["max_steps"],
        "limit_train_batches": 1.0 if limit is None else limit,
    }
