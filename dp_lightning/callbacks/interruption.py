"""Stops a run in order on SIGTERM, SIGINT and SLURM's requeue signal: after a logical step, with a checkpoint.

A signal is only noted. At the end of the step the ranks learn of it together, by the same collective that adds up their
sums; then all of them save one checkpoint and leave. A second SIGINT stops at once, as Ctrl-C does everywhere.
"""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dp_lightning.callbacks.privacy import PrivacyCallback, privacy_of
from dp_lightning.errors import DataError
from dp_lightning.files import replacing
from dp_lightning.foreign_text import read_json

_REQUEUE = signal.SIGUSR1


class Interruption(pl.Callback):
    """Ends ``fit`` with exit code 143 on SIGTERM and on SLURM's requeue signal, and 130 on SIGINT, at a step's end.

    The checkpoint ``interrupted-step=<n>.ckpt`` stands beside those of the first ``ModelCheckpoint``. A SLURM job that
    is sent SIGUSR1 (``#SBATCH --signal=USR1@90``) is put back into the queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signal: int | None = None
        self._folder = Path()
        self._before: dict[int, Any] = {}
        self._ours: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._signal = None
        # Asked by every rank: without a ModelCheckpoint it takes a collective.
        self._folder = _folder(trainer)
        if (mark := _mark(trainer)) is not None and trainer.is_global_zero:
            with replacing(mark) as file:
                file.write(json.dumps({"folder": str(self._folder), "run": _privacy(trainer).run}).encode())

    # Lightning has set its own handlers by then: that of SIGTERM runs a collective wherever a rank happens to be.
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set_handlers(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._before:
            self._set_handlers(trainer)

    def _set_handlers(self, trainer: pl.Trainer) -> None:
        privacy = _privacy(trainer)
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's affair

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number
            privacy.stop_requested = True

        self._ours = note
        for number in (signal.SIGTERM, signal.SIGINT, *((_REQUEUE,) if slurm_job() else ())):
            self._before[number] = signal.signal(number, note)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        privacy = _privacy(trainer)
        if not privacy.stopping:
            return
        number = self._signal or signal.SIGTERM
        path = self._folder / f"interrupted-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        rank_zero_info(
            f"\nStopped by {signal.Signals(number).name} after step {privacy.ledger.num_steps}. "
            f"To go on: --ckpt_path {path}"
        )
        if trainer.is_global_zero:
            privacy.leave_statement(trainer)
            if number == _REQUEUE:
                _requeue()
        # A launcher may kill the others once the first has left.
        trainer.strategy.barrier("interruption")
        external = trainer._accelerator_connector.cluster_environment.creates_processes_externally
        if trainer.local_rank > 0 and not external:
            raise SystemExit(0)  # where Lightning has started a process that fails, it kills the others
        raise SystemExit(130 if number == signal.SIGINT else 143)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            # Lightning has put back by now what was there before its own handlers, which know the whole run.
            if signal.getsignal(number) is self._ours:
                signal.signal(number, handler)
        self._before, self._ours = {}, None


def _privacy(trainer: pl.Trainer) -> PrivacyCallback:
    privacy = privacy_of(trainer)
    assert privacy is not None  # dpl always has one
    return privacy


def _folder(trainer: pl.Trainer) -> Path:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return Path(callback.dirpath)
    return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"


def earlier_start(trainer: pl.Trainer) -> tuple[Path, str] | None:
    """The checkpoints' folder and the run's name of an earlier start of this SLURM job; None where there was none."""
    mark = _mark(trainer)
    if mark is None or not mark.is_file():
        return None
    note = read_json(mark)
    if not isinstance(note, dict) or not all(isinstance(note.get(name), str) for name in ("folder", "run")):
        raise DataError(f"{mark} does not name the folder and the run of an earlier start. Remove it.")
    return Path(note["folder"]), note["run"]


def _mark(trainer: pl.Trainer) -> Path | None:
    job = slurm_job()
    return Path(trainer.default_root_dir) / f".dpl_slurm_job_{job}.json" if job else None


def slurm_job() -> str | None:
    """The id by which this job is put back into the queue; None outside of SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def _requeue() -> None:
    job = slurm_job()
    assert job is not None
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        rank_zero_warn(f"Job {job} could not be put back into the queue: {reason.strip()}. Requeue it by hand.")
