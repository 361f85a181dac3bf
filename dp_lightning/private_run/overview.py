"""What a private run will do and spend, in a few lines of text for its start."""

import math

from dp_lightning.models.batch_norm import fixed_statistics
from dp_lightning.privacy.plan import BEYOND_PRV
from dp_lightning.private_run.run import PrivateRun


def overview(run: PrivateRun) -> str:
    """Method, plan and devices of a run, and what is special about it."""
    settings, trainer, plan, clip = run.settings, run.trainer, run.plan, run.settings.clip_plan
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
    method = "; ".join([f"DP-SGD by {optimizers}", *run.postprocessing])
    views = f", {settings.augmult} views of each example" if settings.augmult > 1 else ""
    epsilon = plan.target_epsilon or run.budget.at(plan.num_steps)
    budget = f"epsilon {epsilon:.4g} at delta {plan.delta:g} by {plan.accountant.upper()}, N {plan.num_train:,} "
    budget += f"{'persons' if settings.images_per_group else 'examples'}, B {plan.expected_batch_size:,}, "
    rows = [
        ("method", f"{method}; {clip.kind.replace('_', ' ')} clipping ({clip.factor}){views}"),
        ("plan", f"{budget}sigma {plan.noise_multiplier:.4g}, C {clip.max_grad_norm:g}, T {plan.num_steps:,} steps"),
        ("epochs", f"{math.ceil(plan.num_steps / trainer.num_training_batches):,}"),
        ("device", f"{trainer.world_size} x {trainer.strategy.root_device.type}, precision {trainer.precision}"),
        *(("note", note) for note in _notes(run)),
    ]
    return "\n".join(f"{label:<13}{text}" for label, text in rows)


def _notes(run: PrivateRun) -> list[str]:
    """What is special about a run: what was trained before, what is frozen, and what keeps it from release."""
    steps, record, settings, notes = run.history.ledger.num_steps, run.history.record, run.settings, []
    if steps:
        notes.append(f"{steps} of the steps are taken, with epsilon {run.budget.spent():.3f}.")
    earlier = {name: sum(count for _, _, count in runs) for name, runs in record.ledger.earlier.items()}
    counted = [f"run {name}: {count} private steps, which count here" for name, count in earlier.items()]
    if before := [*counted, *record.earlier_training]:
        notes.append(f"Training before the run: {'; '.join(before)}.")
    if phases := run.step.phases.describe():
        notes.append(f"Parameters: {phases} (privacy.frozen_until).")
    if fixed := fixed_statistics(run.module):
        notes.append(
            f"{len(fixed)} BatchNorm layers stay in evaluation mode. Their statistics are outside of the guarantee and "
            "have to come from public data."
        )
    elif run.batch_norm != "none":
        notes.append(f"{run.batch_norm} (privacy.batch_norm).")
    if run.plan.priced_by_renyi:
        notes.append(BEYOND_PRV.format("privacy.accountant: pld"))
    if run.plan.noise_multiplier == 0:
        notes.append("No noise is added: this run is NOT PRIVATE.")
    elif reasons := [*sorted(record.faults), *(["it is reproducible"] if settings.reproducible else [])]:
        notes.append(f"This run is NOT FOR RELEASE: {'; '.join(reasons)}.")
    return notes
