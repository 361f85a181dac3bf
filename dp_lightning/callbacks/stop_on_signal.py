"""Stops a run on SIGTERM and SIGINT after a logical step, with a checkpoint.

The handler only notes a signal. At the end of the step the ranks learn of the signal together, by the same collective
that adds up their sums; then they save one checkpoint and exit. A second SIGINT stops the run at once.
"""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from dp_lightning.callbacks.privacy import private_run_of


class StopOnSignal(pl.Callback):
    """Ends ``fit`` with exit code 143 on SIGTERM and 130 on SIGINT, at the end of a step.

    The checkpoint ``interrupted-step=<n>.ckpt`` is saved beside those of the first ``ModelCheckpoint``. Under SLURM,
    Lightning saves a checkpoint and requeues the job on SIGUSR1; that happens at the end of a step too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal: int | None = None
        self._folder = Path()
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the place of Lightning's handlers: that for SIGTERM may start a collective at any moment."""
        self._signal, run = None, private_run_of(trainer)
        folders = [each.dirpath for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        self._folder = Path(next((str(folder) for folder in folders if folder), run.folder / "checkpoints"))

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise SystemExit(_exit_code(number))
            self._signal, run.stop_requested = number, True

        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            requeue = (signal.SIGUSR1,) if callable(signal.getsignal(signal.SIGUSR1)) else ()
            for number in (signal.SIGTERM, signal.SIGINT, *requeue):
                self._before[number] = signal.signal(number, note)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        run = private_run_of(trainer)
        if not run.stopping:
            return
        number: int = trainer.strategy.broadcast(self._signal or signal.SIGTERM)
        checkpoint = self._folder / f"interrupted-step={trainer.global_step}.ckpt"
        if number == signal.SIGUSR1:
            self._before[number](number, None)
        else:
            trainer.save_checkpoint(checkpoint, weights_only=False)
        run.close()
        if trainer.is_global_zero and number != signal.SIGUSR1:
            print(f"Stopped after step {trainer.global_step}. Resume with ckpt_path {checkpoint}")
        # A launcher may kill the others once the first has left.
        trainer.strategy.barrier("interruption")
        environment = getattr(trainer.strategy, "cluster_environment", None)
        # Where a rank that another one has started fails, Lightning kills all of them.
        started = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        raise SystemExit(0 if started else _exit_code(number))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.teardown(trainer, pl_module, "fit")  # before Lightning puts back the handlers that it has found

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def _exit_code(number: int) -> int:
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
