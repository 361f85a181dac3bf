"""The screen of `dpl`: what a run will do, where it is, what it has reached and what can be done next.

On a terminal the lines of a run in progress change in place; a file gets a line for each epoch. The number of physical
batches that a step has drawn is secret, and the losses are of raw training examples: both are shown on a terminal, and
neither is written to a file.
"""

import time
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.live_display import Progress, block, duration, live_lines, log_line
from dp_lightning.private_run.next_commands import after_a_run, checkpoint_of, has_test_set
from dp_lightning.private_run.overview import Evaluation, after, before
from dp_lightning.private_run.planned_counts import epochs_of
from dp_lightning.private_run.terminal import Terminal
from dp_lightning.private_run.withheld_metrics import public_numbers

# Seconds after which a file gets another line, also within an epoch.
_SILENCE = 600.0


class Screen(ProgressBar):
    """Shows a private fit, and the progress of an evaluation, on standard output of rank 0.

    Raises:
        ConfigurationError: when a fit has no `PrivacyCallback` before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled, self._terminal = True, Terminal()
        self._evaluation: Evaluation | None = None  # the last one
        self._evaluated = False  # since the last line of a file
        self._part, self._fraction = "", 0.0
        self._began = self._said = time.monotonic()
        self._steps_before = 0
        self._trains = False

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Called by ``LightningModule.print``."""
        if self._enabled:
            self._terminal.say([sep.join(map(str, args))])

    # A fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._terminal = Terminal()
        if stage == "fit":
            _privacy(trainer).announces = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation = None
        self._say(block(before(_privacy(trainer).private_run), self._terminal.width))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = self._said = time.monotonic()
        self._steps_before, self._trains = _privacy(trainer).ledger.num_steps, True
        self._show(trainer, now=True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        number, count = _privacy(trainer).private_run.piece
        self._part, self._fraction = f"batch {number} of {count}" if count > 1 else "", (number - 1) / count
        self._show(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        number, count = _privacy(trainer).private_run.piece
        self._fraction = number / count % 1  # the ledger has the step once its last piece has ended
        if number == count:
            self._part = ""
        self._show(trainer)
        if time.monotonic() - self._said > _SILENCE:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trains = False
        self._end(trainer, completed=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._terminal.close()
        if self._trains:
            self._trains = False
            self._end(trainer, completed=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._terminal.close()

    # Evaluations

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluates(trainer, args[3], args[4] if len(args) > 4 else 0, trainer.num_val_batches)

    def on_test_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._evaluates(trainer, args[3], args[4] if len(args) > 4 else 0, trainer.num_test_batches)

    def on_predict_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._evaluates(trainer, args[3], args[4] if len(args) > 4 else 0, trainer.num_predict_batches)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._part = ""
        if not trainer.sanity_checking and (privacy := privacy_of(trainer)) is not None:
            self._evaluation = Evaluation.of(public_numbers(trainer), steps=privacy.ledger.num_steps)
            self._evaluated = True

    def _evaluates(self, trainer: pl.Trainer, batch: int, loader: int, counts: list[int | float] | int | float) -> None:
        counts = counts if isinstance(counts, list) else [counts]
        self._part = f"evaluating {sum(counts[:loader]) + batch + 1} of {sum(counts)}"
        if self._trains:
            self._show(trainer)
        elif self._enabled and self._terminal.is_due:
            self._terminal.show([self._part])

    # What is written

    def _progress(self, trainer: pl.Trainer) -> Progress:
        privacy = _privacy(trainer)
        plan, budget, steps = privacy.private_run.plan, privacy.private_run.budget, privacy.ledger.num_steps
        seconds = time.monotonic() - self._began
        done = steps + self._fraction - self._steps_before
        per_step = seconds / done if done >= 1 else None
        accuracies = {} if self._evaluation is None else self._evaluation.accuracies
        raw = privacy.history.unprotected.names
        losses = {
            name if name not in raw or name.startswith("unprotected/") else f"unprotected/{name}": value
            for name, value in self.get_metrics(trainer, trainer.lightning_module).items()
            if name not in ("v_num", *accuracies) and isinstance(value, int | float)
        }
        return Progress(
            step=steps,
            num_steps=plan.num_steps,
            epoch=trainer.current_epoch + 1,
            num_epochs=epochs_of(plan),
            part=self._part,
            fraction=self._fraction,
            epsilon=budget.bound if plan.noise_multiplier > 0 else None,
            target=plan.target_epsilon or budget.planned,
            accuracies=accuracies,
            losses=dict(sorted(losses.items(), key=lambda item: item[0].startswith("unprotected/"))),
            seconds=seconds,
            seconds_left=None if per_step is None else per_step * max(plan.num_steps - steps - self._fraction, 0.0),
        )

    def _show(self, trainer: pl.Trainer, *, now: bool = False) -> None:
        terminal = self._terminal
        if self._enabled and terminal.is_live and (now or terminal.is_due):
            terminal.show(live_lines(self._progress(trainer), terminal.width, ascii_only=terminal.ascii_only))

    def _log(self, trainer: pl.Trainer) -> None:
        self._said = time.monotonic()
        if not self._terminal.is_live:
            progress = self._progress(trainer)
            if not self._evaluated:  # they are in an earlier line
                progress = replace(progress, accuracies={})
            self._say([log_line(progress, time.strftime("%H:%M:%S"))])
        self._evaluated = False

    def _end(self, trainer: pl.Trainer, *, completed: bool) -> None:
        run = _privacy(trainer).private_run
        self._terminal.close()
        if not self._enabled or run.written is None:
            return
        whole = run.written.ledger.num_steps >= run.plan.num_steps
        ended = ("done in" if completed else "stopped", duration(time.monotonic() - self._began))
        self._say(["", *block([ended, *after(run, run.written, self._evaluation)], self._terminal.width)])
        if completed and (checkpoint := checkpoint_of(trainer)) is not None:
            self._say(["", "What to do next:"])
            lines = after_a_run(
                run.folder, checkpoint, has_test_set=has_test_set(trainer), resume=None if whole else []
            )
            for what, command in lines:
                self._say([f"# {what}", command])

    def _say(self, lines: list[str]) -> None:
        if self._enabled:
            self._terminal.say(lines)


def _privacy(trainer: pl.Trainer) -> PrivacyCallback:
    if (privacy := privacy_of(trainer)) is None:
        raise ConfigurationError("Screen needs a private run: put PrivacyCallback before it in trainer.callbacks.")
    return privacy
