"""What a private run will do and spend, in a few lines of text for its start."""

import math

import torch
from torch import nn

from dp_lightning.models.batch_norm import fixed_statistics
from dp_lightning.private_run.next_commands import short
from dp_lightning.private_run.run import PrivateRun


def overview(run: PrivateRun) -> str:
    """Data, model, method, plan, devices and the folder of a run, and what is special about it."""
    settings, trainer, plan, clip = run.settings, run.trainer, run.plan, run.settings.clip_plan
    data, inner = getattr(trainer, "datamodule", None), getattr(run.module, "model", None)
    units = "persons" if settings.images_per_group is not None else "training examples"
    classes = getattr(data, "num_classes", None)
    trained = sum(parameter.numel() for parameter in run.step.parameters.values())
    total = sum(parameter.numel() for parameter in run.module.parameters())
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
    steps = ", then ".join(["DP-SGD", *run.postprocessing, f"{optimizers} step"])
    views = f", {settings.augmult} views of each example" if settings.augmult > 1 else ""
    epsilon = f"{plan.target_epsilon or run.budget.planned:.4g} at delta {plan.delta:g} by {plan.accountant.upper()}"
    epochs = math.ceil(plan.num_steps / trainer.num_training_batches)
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    rows = [
        (
            "data",
            f"{'' if data is None else f'{type(data).__name__}: '}{plan.num_train:,} {units}"
            f"{'' if classes is None else f', {classes} classes'}",
        ),
        (
            "model",
            f"{type(run.module).__name__}{f' ({type(inner).__name__})' if isinstance(inner, nn.Module) else ''}: "
            f"{trained:,} of {total:,} parameters trained",
        ),
        ("method", f"{steps}; {clip.kind.replace('_', ' ')} clipping ({clip.factor}){views}"),
        (
            "plan",
            f"{f'epsilon {epsilon}, ' if plan.noise_multiplier > 0 else ''}B {plan.expected_batch_size:,}, "
            f"sigma {plan.noise_multiplier:.4g}, C {clip.max_grad_norm:g}, "
            f"T {plan.num_steps:,} steps in {epochs:,} epochs",
        ),
        ("device", f"{trainer.world_size} x {name}{nodes}, precision {trainer.precision}"),
        ("results", short(run.folder)),
        *(("note", note) for note in _notes(run)),
    ]
    return "\n".join(f"{label:<13}{text}" for label, text in rows)


def _notes(run: PrivateRun) -> list[str]:
    """What is special about a run: what was trained before, what is frozen, and what keeps it from release."""
    steps, record, settings, notes = run.history.ledger.num_steps, run.history.record, run.settings, []
    if steps:
        notes.append(f"{steps} of the steps are taken, with epsilon {run.budget.spent():.3f}.")
    if record.origin.words:
        notes.append(f"Training before the run: {'; '.join(record.origin.words)}.")
    if phases := run.step.phases.describe():
        notes.append(f"Parameters: {phases} (privacy.frozen_until).")
    if fixed := fixed_statistics(run.module):
        notes.append(
            f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee and "
            "have to come from public data."
        )
    if run.plan.noise_multiplier == 0:
        notes.append("No noise is added: this run is NOT PRIVATE.")
    elif reasons := [*record.origin.faults, *(["it is reproducible"] if settings.reproducible else [])]:
        notes.append(f"This run is NOT FOR RELEASE: {'; '.join(reasons)}.")
    return notes
