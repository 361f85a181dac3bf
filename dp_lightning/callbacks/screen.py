"""The screen of `dpl`: what a run will do, where it is, what it has reached and what can be done next.

On a terminal a bar with a line of numbers changes in place; a file gets one line for each epoch. The number of physical
batches that a step has drawn is secret, and the losses are of raw training examples: both are shown on a terminal, and
neither is written to a file.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.next_commands import after_a_run
from dp_lightning.private_run.overview import Evaluation, after, before, epochs_of

# Seconds between two refreshes, and those over which the time left is estimated.
_REFRESH, _PERIOD = 0.25, 3600.0


class _Bar(Progress):
    """A bar with the time, and a line of numbers below it.

    No thread of its own refreshes it, since a worker of a data loader that is forked meanwhile would inherit its lock.
    """

    def __init__(self) -> None:
        self._numbers, self._refreshed = "", 0.0
        names = TextColumn("{task.description}"), BarColumn(bar_width=None)
        times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
        # rich's own console knows the terminal of its first use in this process.
        super().__init__(
            *names, *times, console=Console(), speed_estimate_period=_PERIOD, auto_refresh=False, transient=True
        )
        self.add_task("", total=None)

    @property
    def is_live(self) -> bool:
        """Whether standard output is a terminal."""
        return sys.stdout.isatty() and self.console.is_interactive

    def get_renderables(self) -> list[RenderableType]:
        return [*super().get_renderables(), Text(self._numbers)]

    def show(self, numbers: Callable[[], str]) -> None:
        """Show it anew on a terminal, unless that was done just now."""
        if self.is_live and time.monotonic() - self._refreshed >= _REFRESH:
            self._numbers, self._refreshed = numbers(), time.monotonic()
            self.start()
            self.refresh()

    def stop(self) -> None:
        """Take it away; rich would also print an empty line into a file."""
        if self.live.is_started:
            super().stop()


class Screen(ProgressBar):
    """Shows a private fit, and the progress of an evaluation, on standard output of rank 0.

    Raises:
        ConfigurationError: when a fit has no `PrivacyCallback` before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled, self._trains = True, False
        self._bar = _Bar()
        self._evaluation: Evaluation | None = None  # the last one

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    # A fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._bar, self._evaluation = _Bar(), None
        if stage == "fit":
            _privacy(trainer).announces = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say(*before(_privacy(trainer).private_run))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._bar, self._trains = _Bar(), True  # the time begins
        self._step()
        _privacy(trainer).private_run.on_physical_batch.append(
            lambda number, count: self._step(f"batch {number} of {count}" if count > 1 else "", number / count)
        )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._step()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._bar.is_live:
            task = self._bar.tasks[0]
            left = [] if task.time_remaining is None else [f"{_duration(task.time_remaining)} left"]
            self._say("  ".join([time.strftime("%H:%M:%S"), task.description, *self._numbers(), *left]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer, completed=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._bar.stop()
        if self._trains:
            self._end(trainer, completed=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._bar.stop()

    # Evaluations

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluates(trainer.num_val_batches, *args[3:])

    def on_test_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._evaluates(trainer.num_test_batches, *args[3:])

    def on_predict_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._evaluates(trainer.num_predict_batches, *args[3:])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._trains:
            logged = trainer.callback_metrics.items()
            public = {n: float(v) for n, v in logged if not (self._is_raw(n) or n.startswith("privacy/"))}
            self._evaluation = Evaluation.of(public, steps=_privacy(trainer).ledger.num_steps)
            self._step()

    def _evaluates(self, counts: Any, batch: int, loader: int = 0) -> None:
        """Show the progress over all loaders of an evaluation."""
        counts = counts if isinstance(counts, list) else [counts]
        done, total = sum(counts[:loader]) + batch + 1, sum(counts)
        if self._trains:
            self._step(f"evaluating {done} of {total}")
        else:
            self._show(f"evaluating {done} of {total}", done, total, str)

    # What is written

    def _step(self, part: str = "", fraction: float = 0.0) -> None:
        """Show where the run is.

        Args:
            part: what is being done within the step.
            fraction: of the step that is done.
        """
        privacy = _privacy(self.trainer)
        run, steps, total = privacy.private_run, privacy.ledger.num_steps, privacy.private_run.plan.num_steps
        step = f"epoch {self.trainer.current_epoch + 1}/{epochs_of(run)}  step {steps}/{total}  {part}"
        self._show(step.rstrip(), steps + fraction, total, lambda: "  ".join([*self._numbers(), *self._losses()]))

    def _show(self, what: str, done: float, total: float, numbers: Callable[[], str]) -> None:
        self._bar.update(self._bar.task_ids[0], description=what, completed=done, total=total)
        if self._enabled:
            self._bar.show(numbers)

    def _numbers(self) -> list[str]:
        """The budget and the accuracies."""
        privacy = _privacy(self.trainer)
        run, plan = privacy.private_run, privacy.private_run.plan
        numbers = [] if self._evaluation is None else [self._evaluation.at(privacy.ledger.num_steps)]
        if plan.noise_multiplier > 0:
            target = plan.target_epsilon or run.budget.planned
            numbers.insert(0, f"epsilon at most {run.budget.bound:.2f} of {target:.2f}")
        return numbers

    def _losses(self) -> list[str]:
        """What is logged for the progress bar; numbers of raw training examples come last, and say so."""
        shown = {} if self._evaluation is None else self._evaluation.shown
        metrics = self.get_metrics(self.trainer, self.trainer.lightning_module).items()
        numbers = [(name, value) for name, value in metrics if isinstance(value, float) and name not in shown]
        named = [(self._is_raw(name), name.removeprefix("unprotected/"), value) for name, value in numbers]
        return [f"{'unprotected/' * raw}{name} {value:#.3g}" for raw, name, value in sorted(named)]

    def _is_raw(self, name: str) -> bool:
        """Whether a number was logged from raw training examples."""
        raw = _privacy(self.trainer).history.unprotected.names
        return name.startswith("unprotected/") or name in {one + end for one in raw for end in ("", "_step", "_epoch")}

    def _end(self, trainer: pl.Trainer, *, completed: bool) -> None:
        self._bar.stop()
        self._trains = False
        run = _privacy(trainer).private_run
        if run.written is None:
            return
        ended = f"{'done in' if completed else 'stopped':<13}{_duration(self._bar.tasks[0].elapsed or 0.0)}"
        self._say("", ended, *after(run, run.written, self._evaluation))
        commands = after_a_run(trainer, run.folder, ended=run.written.ledger.num_steps >= run.plan.num_steps)
        if completed and commands:
            self._say("", "What to do next:", *(line for what, command in commands for line in (f"# {what}", command)))

    def _say(self, *lines: str) -> None:
        """Write lines that stay, above the bar."""
        if self._enabled:
            print(*lines, sep="\n", flush=True)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _privacy(trainer: pl.Trainer) -> PrivacyCallback:
    if (privacy := privacy_of(trainer)) is None:
        raise ConfigurationError("Screen needs a private run: put PrivacyCallback before it in trainer.callbacks.")
    return privacy
