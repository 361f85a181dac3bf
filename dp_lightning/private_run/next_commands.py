"""Command lines that a user can paste: what to do with a run, and how to resume it."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden


def after_a_run(
    run: Path, checkpoint: Path, *, has_test_set: bool, resume: Sequence[str] | None
) -> list[tuple[str, str]]:
    """What can be done with a run that has ended, each with what it is for.

    Args:
        run: folder of the run, with its ``config.yaml``.
        checkpoint: of its weights.
        has_test_set: whether its data has one; without it, the validation split is evaluated.
        resume: options with which training goes on; None where it cannot.
    """
    own = ["--config", short(run / "config.yaml"), "--ckpt_path", short(checkpoint)]
    if has_test_set:
        lines = [
            ("evaluate the weights", ["test", *own]),
            ("write predictions for the test images", ["predict", *own]),
        ]
    else:
        lines = [
            ("evaluate the weights", ["validate", *own]),
            (
                "write predictions for a folder of images",
                ["predict", *own, "--data", "ImageFiles", "--data.root", "FOLDER"],
            ),
        ]
    lines += [
        ("export the network and its statement", ["export", "--ckpt-path", own[-1], "--out", short(run / "export")]),
        ("show the run on one page", ["report", short(run)]),
        ("check statement, journal and weights", ["verify", short(run)]),
    ]
    if resume is not None:
        lines.append(("train on", ["fit", *own, *resume]))
    return [(what, command_line(*arguments)) for what, arguments in lines]


def has_test_set(trainer: pl.Trainer) -> bool:
    """Whether `dpl test` has something to evaluate on."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    splits = getattr(data, "own_splits", None)
    return is_overridden("test_dataloader", data or trainer.lightning_module) if splits is None else "test" in splits


def checkpoint_of(trainer: pl.Trainer) -> Path | None:
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
    """``dpl`` with these arguments, quoted for a shell, as it was called for this run."""
    return " ".join(map(_quoted, [*_program(sys.argv[0]), *arguments]))


def short(path: Path) -> str:
    """A path relative to the current folder where it lies below it, else absolute."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()
    text = str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
    return f"./{text}" if text.startswith("-") else text


def _program(called: str) -> list[str]:
    """How ``dpl`` was called: as a program, from a checkout or as a module."""
    path = Path(called)
    python = "python" if _is_found("python", sys.executable) else short(Path(sys.executable))
    if path.parent.name == "dp_lightning" and path.suffix == ".py":
        return [python, "-m", "dp_lightning"]
    if path.name == "cli.py":
        return [python, short(path)]
    return ["dpl"] if path.name != "dpl" or _is_found("dpl", called) else [short(path)]


def _is_found(name: str, path: str) -> bool:
    """Whether a shell finds this program under its name."""
    found = shutil.which(name)
    return found is not None and os.path.abspath(found) == os.path.abspath(path)


def _quoted(argument: str) -> str:
    if argument.isprintable():
        return shlex.quote(argument)
    # Control characters and bytes that are not UTF-8, as bash and zsh read them.
    content = os.fsencode(argument)
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in content)
    return f"$'{''.join(escaped)}'"
