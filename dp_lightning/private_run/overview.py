"""A run in a few lines of text: what it will do, before its first step, and what it has reached, at its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.next_commands import short
from dp_lightning.private_run.run import PrivateRun


@dataclass(frozen=True)
class Evaluation:
    """The last validation of a run.

    Attributes:
        steps: taken before it.
        shown: its accuracies by name, or else all of its numbers.
    """

    steps: int
    shown: Mapping[str, float]

    @classmethod
    def of(cls, numbers: Mapping[str, float], *, steps: int) -> "Evaluation":
        """A validation with these numbers by name."""
        accuracies = {name: value for name, value in numbers.items() if "acc" in name.rpartition("/")[2].lower()}
        return cls(steps, accuracies or numbers)

    def at(self, step: int) -> str:
        """Its numbers, and after which step they were measured if it was an earlier one."""
        text = ", ".join(f"{name} {value:.4f}" for name, value in self.shown.items())
        return text if self.steps == step else f"{text} after step {self.steps:,}"


def before(run: PrivateRun) -> list[str]:
    """Data, model, method, plan, devices and the folder of a run, and what is special about it."""
    settings, trainer, plan, clip = run.settings, run.trainer, run.plan, run.settings.clip_plan
    data = getattr(trainer, "datamodule", None)
    units = "persons" if settings.images_per_group is not None else "training examples"
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
    steps = ", then ".join(["DP-SGD", *run.postprocessing, f"{optimizers} step"])
    views = f", {settings.augmult} views of each example" if settings.augmult > 1 else ""
    epsilon = plan.target_epsilon or run.budget.planned
    budget = f"epsilon {epsilon:.4g} at delta {plan.delta:g} by {plan.accountant.upper()}, "
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    rows = [
        ("data", f"{'' if data is None else f'{type(data).__name__}: '}{plan.num_train:,} {units}{_images(data)}"),
        ("model", _model(run)),
        ("method", f"{steps}; {clip.kind.replace('_', ' ')} clipping ({clip.factor}){views}"),
        (
            "plan",
            f"{budget if plan.noise_multiplier > 0 else ''}B {plan.expected_batch_size:,}, "
            f"sigma {plan.noise_multiplier:.4g}, C {clip.max_grad_norm:g}, "
            f"T {plan.num_steps:,} steps in {epochs_of(run):,} epochs",
        ),
        ("device", f"{trainer.world_size} x {name}{nodes}, precision {trainer.precision}"),
        ("results", short(run.folder)),
        *(("note", note) for note in run.budget.notes(reproducible=settings.reproducible)),
    ]
    return _lines(rows)


def after(run: PrivateRun, statement: PrivacyStatement, evaluation: Evaluation | None) -> list[str]:
    """What was reached, at what cost, and whether it may be released."""
    outside, due = ", ".join(statement.unprotected), run.trainer.enable_validation
    none = "not evaluated: no validation was due (trainer.check_val_every_n_epoch)" if due else ""
    rows = [
        ("reached", none if evaluation is None else evaluation.at(statement.ledger.num_steps)),
        ("privacy", statement.short().splitlines()[0]),
        ("unprotected", f"logged from raw examples, do not publish: {outside}" if outside else ""),
        ("release", statement.release),
        ("results", short(run.folder)),
    ]
    return _lines(rows)


def epochs_of(run: PrivateRun) -> int:
    """How many epochs the run has."""
    plan, trainer = run.plan, run.trainer
    if trainer.max_steps == -1 and trainer.max_epochs is not None:
        return trainer.max_epochs
    return math.ceil(plan.num_steps / max(1, round(plan.num_train / plan.expected_batch_size)))


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{label:<13}{text}" for label, text in rows if text]


def _images(data: object) -> str:
    """What the data module says of its images."""
    size = getattr(data, "image_size", None)
    channels, classes = getattr(data, "in_channels", None), getattr(data, "num_classes", None)
    images = "" if size is None or channels is None else f", images of {channels} x {size} x {size}"
    return ("" if classes is None else f", {classes} classes") + images


def _model(run: PrivateRun) -> str:
    inner = getattr(run.module, "model", None)
    name = type(run.module).__name__ + (f" ({type(inner).__name__})" if isinstance(inner, nn.Module) else "")
    trained = sum(parameter.numel() for parameter in run.step.parameters.values())
    total = sum(parameter.numel() for parameter in run.module.parameters())
    return f"{name}: {trained:,} of {total:,} parameters trained"
