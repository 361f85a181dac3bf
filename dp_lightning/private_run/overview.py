"""A run in a few rows of text: what it will do, before its first step, and what it has reached, at its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn

from dp_lightning.lightning_modules.base import ImageClassifier
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.next_commands import short
from dp_lightning.private_run.planned_counts import epochs_of
from dp_lightning.private_run.run import PrivateRun

Rows = list[tuple[str, str]]


def before(run: PrivateRun) -> Rows:
    """Data, model, method, plan, devices and the folder of a run, and what is special about it."""
    settings, trainer = run.settings, run.trainer
    notes = run.budget.notes(reproducible=settings.reproducible)
    return [
        ("data", _data(run)),
        ("model", _model(run)),
        ("method", _method(run)),
        ("plan", _plan(run)),
        ("device", _devices(trainer)),
        ("results", short(run.folder)),
        *(("note", note) for note in notes),
    ]


@dataclass(frozen=True)
class Evaluation:
    """The last validation of a run.

    Attributes:
        steps: taken before it.
        accuracies: what is shown of its numbers.
        numbers: all of them by name.
    """

    steps: int
    accuracies: Mapping[str, float]
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, numbers: Mapping[str, float], *, steps: int) -> "Evaluation":
        """Its accuracies are shown if it has any, or else all of its numbers."""
        named = {name: value for name, value in numbers.items() if "acc" in name.rpartition("/")[2].lower()}
        return cls(steps, named or numbers, numbers)


def after(run: PrivateRun, statement: PrivacyStatement, evaluation: Evaluation | None) -> Rows:
    """What was reached, at what cost, and whether it may be released."""
    guarantee = statement.short().splitlines()[0]
    outside = ", ".join(statement.unprotected)
    return [
        ("reached", _reached(run, statement.ledger.num_steps, evaluation)),
        ("note", "" if evaluation is None else _losses_of_a_guess(run, evaluation.numbers)),
        ("privacy", guarantee),
        ("unprotected", f"logged from raw examples, do not publish: {outside}" if outside else ""),
        ("release", statement.release),
        ("results", short(run.folder)),
    ]


def _reached(run: PrivateRun, steps: int, evaluation: Evaluation | None) -> str:
    if evaluation is None:
        due = run.trainer.enable_validation
        return "not evaluated: no validation was due (trainer.check_val_every_n_epoch)" if due else ""
    text = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.accuracies.items())
    return text if evaluation.steps == steps else f"{text}, after step {evaluation.steps:,} of {steps:,}"


def _losses_of_a_guess(run: PrivateRun, numbers: Mapping[str, float]) -> str:
    """What to do if the loss is above that of equal probabilities for all classes."""
    classes = getattr(getattr(run.trainer, "datamodule", None), "num_classes", None)
    if not isinstance(run.module, ImageClassifier) or classes is None:
        return ""
    above = [f"{name} {value:.2f}" for name, value in numbers.items() if "loss" in name and value > math.log(classes)]
    return (
        f"{', '.join(above)}: equal probabilities for all classes have {math.log(classes):.2f}, so those of this "
        "network are too sure of themselves; lower the learning rate"
        if above
        else ""
    )


def _data(run: PrivateRun) -> str:
    data, plan = getattr(run.trainer, "datamodule", None), run.plan
    units = "persons" if run.settings.images_per_group is not None else "training examples"
    parts = [f"{plan.num_train:,} {units}"]
    if (classes := getattr(data, "num_classes", None)) is not None:
        parts.append(f"{classes} classes")
    channels, size = getattr(data, "in_channels", None), getattr(data, "image_size", None)
    if channels is not None and size is not None:
        parts.append(f"images of {channels} x {size} x {size}" if size > 1 else f"{channels} features")
    return (f"{type(data).__name__}: " if data is not None else "") + ", ".join(parts)


def _model(run: PrivateRun) -> str:
    inner = getattr(run.module, "model", None)
    name = type(run.module).__name__ + (f" ({type(inner).__name__})" if isinstance(inner, nn.Module) else "")
    trained = sum(parameter.numel() for parameter in run.step.parameters.values())
    total = sum(parameter.numel() for parameter in run.module.parameters())
    return f"{name}: {trained:,} of {total:,} parameters trained"


def _method(run: PrivateRun) -> str:
    clip = run.settings.clip_plan
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in run.trainer.optimizers)
    views = f", {run.settings.augmult} views of each example" if run.settings.augmult > 1 else ""
    steps = ["DP-SGD", *run.postprocessing, f"{optimizers} step"]
    return f"{', then '.join(steps)}; {clip.kind.replace('_', ' ')} clipping ({clip.factor}){views}"


def _plan(run: PrivateRun) -> str:
    plan, clip = run.plan, run.settings.clip_plan
    parts = []
    if plan.noise_multiplier > 0:
        target = plan.target_epsilon or run.budget.planned
        parts.append(f"epsilon {target:.4g} at delta {plan.delta:g} by {plan.accountant.upper()}")
    return ", ".join(
        [
            *parts,
            f"B {plan.expected_batch_size:,}",
            f"sigma {plan.noise_multiplier:.4g}",
            f"C {clip.max_grad_norm:g}",
            f"T {plan.num_steps:,} steps in {epochs_of(plan):,} epochs",
        ]
    )


def _devices(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    return f"{trainer.world_size} x {name}{nodes}, precision {trainer.precision}"
