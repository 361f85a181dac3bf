"""Command lines that a user can paste: what to do with a run, and how to resume it."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden


def after_a_run(trainer: pl.Trainer, run: Path, *, ended: bool) -> list[tuple[str, str]]:
    """What can be done with the best or last checkpoint of a fit, each with what it is for; nothing without one.

    Args:
        trainer: that has fitted. Where its data has no test set, the validation split is evaluated.
        run: folder of the run, with its ``config.yaml``.
        ended: whether all steps of the plan are taken, so that training cannot be resumed.
    """
    if (checkpoint := _checkpoint_of(trainer)) is None:
        return []
    own = ["--config", short(run / "config.yaml"), "--ckpt_path", short(checkpoint)]
    if _has_test_set(trainer):
        evaluate, images, predict = "test", "the test images", ["predict", *own]
    else:
        evaluate, images = "validate", "a folder of images"
        predict = ["predict", *own, "--data", "ImageFiles", "--data.root", "FOLDER"]
    lines = [
        ("evaluate the weights", [evaluate, *own]),
        (f"write predictions for {images}", predict),
        ("export the network and its statement", ["export", "--ckpt-path", own[-1], "--out", short(run / "export")]),
        ("show the run on one page", ["report", short(run)]),
        ("check statement, journal and weights", ["verify", short(run)]),
        ("train on", ["fit", *own]),
    ]
    return [(what, command_line(*arguments)) for what, arguments in lines[: -1 if ended else None]]


def _has_test_set(trainer: pl.Trainer) -> bool:
    """Whether `dpl test` has something to evaluate on."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    splits = getattr(data, "own_splits", None)
    return is_overridden("test_dataloader", data or trainer.lightning_module) if splits is None else "test" in splits


def _checkpoint_of(trainer: pl.Trainer) -> Path | None:
    """The best checkpoint, or else the last one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for path in (callback.best_model_path, callback.last_model_path):
                if path and Path(path).is_file():
                    return Path(path)
    return None


def resume_line(run: Path, checkpoint: Path) -> str:
    """The command that resumes a run from a checkpoint; for a run of a Trainer of one's own, what to give to its fit.

    Args:
        run: folder of the run.
        checkpoint: to resume from.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return f"trainer.fit(..., ckpt_path={str(checkpoint)!r})"
    return command_line("fit", "--config", short(config), "--ckpt_path", short(checkpoint))


def command_line(*arguments: str) -> str:
    """``dpl`` with these arguments, quoted for a shell; the module where a shell does not find the program."""
    program = ["dpl"] if shutil.which("dpl") else [sys.executable, "-m", "dp_lightning"]
    return shlex.join([*program, *arguments])


def short(path: Path) -> str:
    """A path relative to the current folder where it lies below it, else absolute."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
