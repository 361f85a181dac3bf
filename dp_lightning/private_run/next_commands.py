"""Command lines that a user can paste, such as that which resumes a run."""

import os
import shlex
import shutil
import sys
from pathlib import Path


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
