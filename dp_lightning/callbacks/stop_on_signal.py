"""Stops a run cleanly on SIGTERM, SIGINT and SLURM's requeue signal: after a logical step, with a checkpoint.

A signal is only noted. At the end of the step the ranks learn of it together, by the same collective that adds up their
sums; then they save one checkpoint and exit. If no step is left, the run ends normally, with the exit code of the
signal. A second SIGINT stops at once, as Ctrl-C does everywhere.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_internals import put_back_handlers, silence_sigterm
from dp_lightning.private_run.finished_run import checkpoint_folder
from dp_lightning.private_run.next_commands import resume_line
from dp_lightning.private_run.slurm import leave_mark, requeue, slurm_job
from dp_lightning.strategies.launcher import starter_of

_REQUEUE = signal.SIGUSR1


class StopOnSignal(pl.Callback):
    """Ends ``fit`` with exit code 143 on SIGTERM and on SLURM's requeue signal, and 130 on SIGINT, at a step's end.

    The checkpoint ``interrupted-step=<n>.ckpt`` is saved beside those of the first ``ModelCheckpoint``. A SLURM job
    that is sent SIGUSR1 (``#SBATCH --signal=USR1@90``) is put back into the queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal: int | None = None
        self._folder = Path()
        self._log: Path | None = None
        self._steps_before = 0
        self._saved: Path | None = None
        self._before: dict[int, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._signal = self._saved = None
        self._steps_before = _privacy(trainer).ledger.num_steps
        # Asked by every rank: they take collectives.
        self._folder, self._log = checkpoint_folder(trainer), Path(trainer.log_dir or trainer.default_root_dir)
        leave_mark(trainer, run=_privacy(trainer).run, checkpoints=self._folder, log=self._log)
        self._set_handlers(trainer)

    def _set_handlers(self, trainer: pl.Trainer) -> None:
        run = _privacy(trainer).private_run
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise SystemExit(_exit_code(number))
            self._signal = number
            run.stop_requested = True

        self._put_back_handlers(trainer)
        for number in (signal.SIGTERM, signal.SIGINT, *((_REQUEUE,) if slurm_job() else ())):
            self._before[number] = signal.signal(number, note)
        silence_sigterm(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        privacy = _privacy(trainer)
        if not privacy.private_run.stopping:
            return
        number = self._signal or signal.SIGTERM
        self._saved = self._folder / f"interrupted-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(self._saved, weights_only=False)
        if trainer.is_global_zero:
            privacy.private_run.leave_statement()
            if number == _REQUEUE:
                requeue()
        # A launcher may kill the others once the first has left.
        trainer.strategy.barrier("interruption")
        self._leave(trainer, number)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Rank 0 has written what a run leaves behind; a launcher may kill it once another one has left.
        trainer.strategy.barrier("end")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back_handlers(trainer)
        if self._signal is not None:  # it came when no step was left
            self._leave(trainer, self._signal)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back_handlers(trainer)
        checkpoint = self._newest_checkpoint(trainer)
        if self._log is None or not trainer.is_global_zero:
            return
        steps = _privacy(trainer).ledger.num_steps
        if checkpoint is None:
            if steps > self._steps_before and not isinstance(exception, Exception):
                print(
                    f"Stopped after step {steps}, without a checkpoint: the weights are lost, and what the steps have "
                    "spent stays spent. It is in the run's statement and journal.",
                    file=sys.stderr,
                    flush=True,
                )
            return
        command = resume_line(self._log, checkpoint)
        if isinstance(exception, Exception):
            exception.add_note(f"To resume from the last checkpoint:\n{command}")
            return
        sys.stdout.flush()
        # A step that is cut short is in the ledger before Lightning counts it: only a clean stop tells what was lost.
        missing = steps - trainer.global_step if checkpoint == self._saved else 0
        lost = f", {missing} of which were lost before" if missing else ""
        print(f"Stopped after step {steps}{lost}. To resume:\n{command}", file=sys.stderr, flush=True)

    def _newest_checkpoint(self, trainer: pl.Trainer) -> Path | None:
        """The newest one of this fit, or that from which it started where it has only taken steps."""
        if self._saved is not None:
            return self._saved
        paths = [
            Path(path)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
            for path in (*callback.best_k_models, callback.best_model_path, callback.last_model_path)
            if path and Path(path).is_file()
        ]
        if not paths and trainer.ckpt_path is not None and _privacy(trainer).ledger.num_steps > self._steps_before:
            paths = [Path(trainer.ckpt_path)]
        return max(paths, key=lambda path: path.stat().st_mtime, default=None)

    def _put_back_handlers(self, trainer: pl.Trainer) -> None:
        put_back_handlers(trainer, self._before)
        self._before = {}

    def _leave(self, trainer: pl.Trainer, number: int) -> NoReturn:
        self._signal = None
        if starter_of(trainer.local_rank) is not None:
            raise SystemExit(0)  # where a rank that another one has started fails, Lightning kills all of them
        raise SystemExit(_exit_code(number))


def _exit_code(number: int) -> int:
    return 128 + (signal.SIGTERM if number == _REQUEUE else number)


def _privacy(trainer: pl.Trainer) -> PrivacyCallback:
    if (privacy := privacy_of(trainer)) is None:
        raise ConfigurationError(
            "StopOnSignal needs a private run: put PrivacyCallback before it in trainer.callbacks."
        )
    return privacy
