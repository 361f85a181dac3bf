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
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_internals import leave_signals_alone, take_signals_again
from dp_lightning.private_run.finished_run import checkpoint_folder
from dp_lightning.private_run.next_commands import resume_line
from dp_lightning.private_run.slurm import leave_mark, requeue, slurm_job

_REQUEUE = signal.SIGUSR1


class StopOnSignal(pl.Callback):
    """Ends ``fit`` with exit code 143 on SIGTERM and on SLURM's requeue signal, and 130 on SIGINT, at a step's end.

    The checkpoint ``interrupted-step=<n>.ckpt`` is saved beside those of the first ``ModelCheckpoint``. A SLURM job
    that is sent SIGUSR1 (``#SBATCH --signal=USR1@90``) is put back into the queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal: int | None = None
        self._folder = self._log = Path()
        self._steps_before: int | None = None  # that the fit started
        self._before: dict[int, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        privacy = _privacy(trainer)
        self._signal, self._steps_before = None, privacy.ledger.num_steps
        # Asked by every rank: they take collectives.
        self._folder, self._log = checkpoint_folder(trainer), Path(trainer.log_dir or trainer.default_root_dir)
        leave_mark(trainer, run=privacy.run, checkpoints=self._folder, log=self._log)

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise SystemExit(_exit_code(number))
            self._signal, privacy.private_run.stop_requested = number, True

        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGTERM, signal.SIGINT, *((_REQUEUE,) if slurm_job() else ())):
                self._before[number] = signal.signal(number, note)
            leave_signals_alone(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        privacy = _privacy(trainer)
        if not privacy.private_run.stopping:
            return
        number = self._signal or signal.SIGTERM
        trainer.save_checkpoint(self._folder / f"interrupted-step={trainer.global_step}.ckpt", weights_only=False)
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
        if self._steps_before is None or not trainer.is_global_zero:
            return
        steps, checkpoint = _privacy(trainer).ledger.num_steps, self._newest_checkpoint(trainer)
        resume = None if checkpoint is None else resume_line(self._log, checkpoint)
        if isinstance(exception, Exception):
            if resume is not None:
                exception.add_note(f"To resume from the last checkpoint:\n{resume}")
        elif resume is not None:
            print(f"Stopped after step {steps}. To resume:\n{resume}", file=sys.stderr, flush=True)
        elif steps > self._steps_before:
            told = "without a checkpoint: the weights are lost, and what the steps have spent stays spent"
            print(f"Stopped after step {steps}, {told}.", file=sys.stderr, flush=True)

    def _newest_checkpoint(self, trainer: pl.Trainer) -> Path | None:
        """The newest one of this fit, or that from which it started."""
        interrupted = self._folder / f"interrupted-step={trainer.global_step}.ckpt"
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        named = [path for one in callbacks for path in (*one.best_k_models, one.best_model_path, one.last_model_path)]
        paths = [path for path in (interrupted, *map(Path, filter(None, named))) if path.is_file()]
        started = None if trainer.ckpt_path is None else Path(trainer.ckpt_path)
        return max(paths, key=lambda path: path.stat().st_mtime, default=started)

    def _put_back_handlers(self, trainer: pl.Trainer) -> None:
        take_signals_again(trainer)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _leave(self, trainer: pl.Trainer, number: int) -> NoReturn:
        self._signal = None
        environment = getattr(trainer.strategy, "cluster_environment", None)
        started = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        # Where a rank that another one has started fails, Lightning kills all of them.
        raise SystemExit(0 if started else _exit_code(number))


def _exit_code(number: int) -> int:
    return 128 + (signal.SIGTERM if number == _REQUEUE else number)


def _privacy(trainer: pl.Trainer) -> PrivacyCallback:
    if (privacy := privacy_of(trainer)) is None:
        raise ConfigurationError(
            "StopOnSignal needs a private run: put PrivacyCallback before it in trainer.callbacks."
        )
    return privacy
