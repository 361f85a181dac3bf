"""What a run costs, before it starts: epsilon, noise, steps, and an estimate of its time on this machine."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from dp_lightning.commands.composition import prepare
from dp_lightning.commands.training import TrainingCLI
from dp_lightning.errors import DpLightningError
from dp_lightning.privacy.gradients.gradient_sum import clipped_gradient_sum
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.private_run.settings import PrivacySettings
from dp_lightning.private_run.trainer_checks import check_order, check_settings

# Runs that differ only in these are accepted or refused together.
_NUMBERS = {
    "privacy": ("expected_batch_size", "target_epsilon", "noise_multiplier", "reproducible"),
    "trainer": ("max_epochs", "max_steps"),
}
# Rows of the step that is timed, or fewer if the run's physical batches are smaller.
_ROWS = 16


class Pricing:
    """Prices runs; what they have in common is built and timed once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float | None] | DpLightningError] = {}
        self._seconds_per_row: dict[str, float | None] = {}

    def __call__(self, settings: Mapping[str, Any]) -> tuple[PrivacyPlan, float | None]:
        """The plan of a run with this whole configuration, and the seconds of its training steps on this machine.

        The seconds are estimated from one step on synthetic images; None if the model cannot take it.

        Raises:
            DpLightningError: as ``dpl fit`` would, for wrong settings or data.
        """
        rest = {key: value for key, value in settings.items() if key != "seed_everything"}
        for group, names in _NUMBERS.items():
            rest[group] = {name: value for name, value in settings[group].items() if name not in names}
        key = _key(rest)
        if key not in self._known:
            self._known[key] = self._look_at(settings)
        known = self._known[key]
        if isinstance(known, DpLightningError):
            raise known
        num_train, seconds_per_row = known
        privacy = settings["privacy"]
        plan = plan_of(privacy, settings["trainer"], num_train=num_train)
        rows = plan.num_steps * plan.expected_batch_size * privacy["augmult"] * (privacy.get("images_per_group") or 1)
        return plan, None if seconds_per_row is None else seconds_per_row * rows

    def _look_at(self, settings: Mapping[str, Any]) -> tuple[int, float | None] | DpLightningError:
        """N and the seconds per row, or the error with which ``dpl fit`` would refuse the run."""
        try:
            cli = prepare(settings)
            check_settings(cli.trainer, cli.model)
            check_order(cli.trainer, cli.privacy)
            num_train = cast(int, cli.privacy.num_train)
        except DpLightningError as error:
            return error
        privacy = settings["privacy"]
        shared = {name: privacy.get(name) for name in ("disk", "max_physical_batch_size")}
        shared |= {"model": settings["model"], "data": settings["data"]}
        key = _key({**shared, "precision": settings["trainer"].get("precision")})
        if key not in self._seconds_per_row:
            self._seconds_per_row[key] = _seconds_per_row(cli)
        return num_train, self._seconds_per_row[key]


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
    return run.make_plan(
        run.shape(num_train=num_train, max_epochs=trainer.get("max_epochs"), max_steps=trainer["max_steps"])
    )


def _seconds_per_row(cli: TrainingCLI) -> float | None:
    """Seconds per row for clipped gradients on synthetic images: the faster of two passes after a warm-up.

    None for a user's module that has only a training step, without a ``forward`` from images to classes.
    """
    device = cli.trainer.strategy.root_device
    module, data = cli.model.to(device), cast(Any, cli.datamodule)
    rows = min(_ROWS, cli.privacy.max_physical_batch_size)
    shape = (rows, data.in_channels) if data.image_size == 1 else (rows, data.in_channels, *[data.image_size] * 2)
    images, labels = torch.rand(shape, device=device), torch.zeros(rows, dtype=torch.long, device=device)
    seconds = math.inf
    with cli.trainer.precision_plugin.train_step_context():
        for number in range(3):
            start = time.perf_counter()
            try:
                _, norms = clipped_gradient_sum(
                    module, nn.functional.cross_entropy, images, labels, clip_plan=cli.privacy.clip_plan
                )
            except Exception:  # the user's own code may raise anything on synthetic images
                return None
            float(norms.sum())  # waits for the device
            if number > 0:
                seconds = min(seconds, time.perf_counter() - start)
    return seconds / rows
