"""The folder of one run: its configuration, its results, and whether it is finished.

    <out>/<labels>-<id>/run.yaml    the whole configuration of ``dpl fit``
                        run/        its default_root_dir
                        log.txt     its output

The id is a hash of the configuration, so that runs with different settings have different folders.
"""

import copy
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.foreign_text import read_json

# What every run writes.
_NEEDED: dict[str, tuple[type, ...]] = {
    "completed": (bool,),
    "num_steps": (int, float),
    "num_steps_planned": (int, float),
    "epsilon": (int, float, str),
    "delta": (int, float),
    "seconds": (int, float),
    "test_accuracy_last": (int, float, NoneType),
    "test_accuracy_best": (int, float, NoneType),
}
# What some runs also write: a number, and lists of numbers.
_NUMBERS = ("snr_first_epoch", "val_accuracy_last")
_LISTS = ("test_accuracy_curve", "val_accuracy_curve", "evaluated_after_steps")
#: The page of `dpl report` and a run's folder.
RUN_PAGE = "report.html"
# Characters of the labels; file systems allow names of up to 255 bytes.
_LONGEST = 60


def is_finished(result: Mapping[str, Any] | None) -> bool:
    """Whether a run with this result is finished: all steps are taken, or a setting has ended it early."""
    return result is not None and result["completed"] is True


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.root, self.log = path / "run.yaml", path / "run", path / "log.txt"

    @classmethod
    def of(cls, out: Path, name: str, settings: Mapping[str, Any]) -> "RunFolder":
        """The folder of a run with these settings.

        Args:
            name: readable; characters that are special to a file system or a shell are replaced.
            settings: the whole configuration, without ``trainer.default_root_dir``.
        """
        text = json.dumps(settings, sort_keys=True, default=str)
        plain = re.sub(r"[^\w.+=-]", "-", name)[:_LONGEST]
        return cls(out.resolve() / f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Write its configuration.

        Raises:
            ConfigurationError: if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            trainer = {**copy.deepcopy(settings["trainer"]), "default_root_dir": str(self.root)}
            for logger in components(trainer, "logger"):
                if "save_dir" in logger["init_args"]:
                    logger["init_args"]["save_dir"] = str(self.root)
            with replacing(self.config) as file:
                file.write(yaml.safe_dump({**settings, "trainer": trainer}, sort_keys=False).encode())
        except OSError as error:
            raise ConfigurationError(f"--out: {self.path} cannot be written: {error.strerror}.") from error

    @property
    def result(self) -> dict[str, Any] | None:
        """The run's ``result.json``, and as ``release`` what its statement says about its release.

        None if it is not written yet, or incomplete.
        """
        return None if (found := self._furthest) is None else found[1]

    @property
    def logs(self) -> Path | None:
        """The log folder with that result; None if there is none."""
        return None if (found := self._furthest) is None else found[0]

    @property
    def _furthest(self) -> tuple[Path, dict[str, Any]] | None:
        found = []
        for path in self.root.rglob("result.json"):
            result = result_in(path.parent)
            if result is not None:
                release = read_facts(path.with_name("privacy_statement.json")).get("release")
                said = str(release or "not for release: there is no privacy statement")
                found.append((path.parent, {**result, "release": said}))
        return max(found, key=lambda one: (one[1]["completed"] is True, one[1]["num_steps"]), default=None)

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return is_finished(self.result)

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to resume from; None if there is no intact one."""
        files = sorted(self.root.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
        return next(filter(_is_intact, files), None)

    @property
    def abandoned(self) -> int:
        """How many attempts were set aside; see `abandon`."""
        return len(self._abandoned)

    @property
    def _abandoned(self) -> list[int]:
        names = (path.name.removeprefix("abandoned_") for path in self.path.glob("abandoned_*"))
        return [int(name) for name in names if name.isdigit()]

    def abandon(self) -> None:
        """Set aside the files of an attempt that left no intact checkpoint, so that the run starts again.

        Its steps used the data, but the run's epsilon does not count them, so none of these files may be released.
        """
        if self.root.exists():
            self.root.rename(self.path / f"abandoned_{max(self._abandoned, default=-1) + 1}")


def _is_intact(checkpoint: Path) -> bool:
    """Whether its checksums match; torch is not imported for it."""
    try:
        with zipfile.ZipFile(checkpoint) as file:
            return file.testzip() is None
    except Exception:  # zipfile raises many kinds for a damaged file
        return False


def result_in(folder: Path) -> dict[str, Any] | None:
    """The ``result.json`` of a run's log folder; None if it is missing or incomplete."""
    result = read_facts(folder / "result.json")
    return result if _is_result(result) else None


def _is_result(content: Mapping[str, Any]) -> bool:
    """Whether each value has the type that a run writes: the file may hold anything."""
    lists = [content.get(name) or [] for name in _LISTS]
    return (
        all(name in content and isinstance(content[name], kinds) for name, kinds in _NEEDED.items())
        and all(isinstance(content.get(name, 0), int | float | NoneType) for name in _NUMBERS)
        and all(isinstance(one, list) and all(isinstance(value, int | float) for value in one) for one in lists)
    )


def components(trainer: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """The settings of a trainer's ``logger`` or ``callbacks`` that have arguments."""
    given = trainer.get(kind)
    every = given if isinstance(given, list) else [given]
    return [one for one in every if isinstance(one, dict) and isinstance(one.get("init_args"), dict)]


def read_facts(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty if the file is missing, cut off, or holds something else."""
    try:
        content = read_json(path)
    except (OSError, DataError):
        return {}
    return content if isinstance(content, dict) else {}
