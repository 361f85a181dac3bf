"""A job that SLURM puts back into the queue: its id, and where its next start finds its run."""

import json
import os
import subprocess
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import DataError
from dp_lightning.foreign_text import read_json


def slurm_job() -> str | None:
    """The id by which this job is put back into the queue; None outside of SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def leave_mark(trainer: pl.Trainer, *, run: str, checkpoints: Path, log: Path) -> None:
    """Let the next start of this SLURM job find the run; outside of SLURM nothing is written."""
    if (mark := _mark(trainer)) is not None and trainer.is_global_zero:
        with replacing(mark) as file:
            file.write(json.dumps({"folder": str(checkpoints), "log": str(log), "run": run}).encode())


def earlier_start(trainer: pl.Trainer) -> tuple[list[Path], str] | None:
    """The folders of checkpoints and journals and the run's name of an earlier start of this SLURM job, if any.

    Raises:
        DataError: where the mark of that start does not name them.
    """
    mark = _mark(trainer)
    if mark is None or not mark.is_file():
        return None
    note = read_json(mark)
    if not isinstance(note, dict) or not all(isinstance(note.get(name), str) for name in ("folder", "run")):
        raise DataError(f"{mark} does not name the folder and the run of an earlier start. Remove it.")
    return [Path(str(note[name])) for name in ("folder", "log") if name in note], note["run"]


def requeue() -> None:
    """Put this job back into the queue."""
    try:
        subprocess.run(["scontrol", "requeue", str(slurm_job())], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        rank_zero_warn(f"Job {slurm_job()} could not be put back into the queue: {reason.strip()}. Requeue it by hand.")


def _mark(trainer: pl.Trainer) -> Path | None:
    job = slurm_job()
    return Path(trainer.default_root_dir) / f".dpl_slurm_job_{job}.json" if job else None
