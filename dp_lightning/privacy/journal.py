"""The journal of a run: one line per logical step, on disk before the step's result is used.

A checkpoint holds the ledger as it stood when the checkpoint was written. Steps that ran after it and were lost in a
crash have been spent all the same, and only the journal knows them. One stands in every folder that holds a
checkpoint of the run; each only ever grows, and names the others.
"""

import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from dp_lightning.errors import DataError
from dp_lightning.files import replacing
from dp_lightning.privacy.accounting import Ledger

_NAMES = ("noise_multiplier", "sample_rate")
_Step = tuple[float, float]
_Steps = dict[str, _Step]
"""Steps by their ids, which tell apart those that several journals share from those that only one of them holds."""


class Journal:
    """Records the steps of one run in all folders that it was given.

    Args:
        run: name of the run, part of the files' names.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._files: dict[Path, int] = {}  # with the bytes that each holds
        self._steps: _Steps = {}

    @property
    def ledger(self) -> Ledger:
        """Every step that one of the journals holds."""
        ledger = Ledger()
        totals = Counter(self._steps.values())
        ledger.load_state_dict({"runs": [[*step, count] for step, count in totals.items()]})
        return ledger

    def path(self, folder: Path) -> Path:
        """Where the journal stands in a folder."""
        return folder.resolve() / f"privacy_journal_{self.run}.jsonl"

    def read(self, folder: Path) -> Ledger | None:
        """The steps in the journal that stands in ``folder`` and in those that they name; None where there is none.

        A step that any of them holds counts, and each of them gets those that it lacks: a process may have been killed
        after it wrote to one of them. From now on steps are recorded in all of them.

        Raises:
            DataError: when one cannot be read or written.
        """
        path = self.path(folder)
        if not path.is_file():
            return None
        known = [path]
        for place in known:  # which grows by those that each of them names
            if place.is_file():
                self._take(place)
                named = [self.path(Path(entry["folder"])) for entry in _entries(place) if "folder" in entry]
                known += [other for other in dict.fromkeys(named) if other not in known]
        self._complete()
        return self.ledger

    def add_folder(self, folder: Path, ledger: Ledger) -> None:
        """Keep a journal in ``folder`` too, with all steps so far; one that stands there gets those that it lacks.

        Raises:
            DataError: when it cannot be read or written.
        """
        path = self.path(folder)
        if path in self._files:
            return
        self._steps |= _steps(path) if path.is_file() else {}
        for step in (ledger.totals - Counter(self._steps.values())).elements():
            self._steps[secrets.token_hex(8)] = step
        folders = [_line({"folder": str(known.parent)}) for known in self._files]
        stood = path.is_file()
        if not stood:
            try:
                with replacing(path) as file:
                    file.writelines([*(_step_line(name, step) for name, step in self._steps.items()), *folders])
            except OSError as error:
                raise _not_written(path, error) from error
        self._append(_line({"folder": str(path.parent)}))
        self._take(path)
        self._write(path, folders if stood else [])
        self._complete()

    def record(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Write one step to disk, in every folder.

        Raises:
            DataError: when one of them cannot be written; the step must not be released.
        """
        name, step = secrets.token_hex(8), (noise_multiplier, sample_rate)
        self._append(_step_line(name, step))
        self._steps[name] = step

    def _take(self, path: Path) -> None:
        """Count its steps and record in it from now on; a line that was cut short stays a line of its own."""
        if path not in self._files:
            self._steps |= _steps(path)
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                _append(path, b"\n")
            self._files[path] = path.stat().st_size

    def _complete(self) -> None:
        """Give each file the steps that it lacks."""
        for path in self._files:
            held = _steps(path)
            self._write(path, [_step_line(name, step) for name, step in self._steps.items() if name not in held])

    def _append(self, line: bytes) -> None:
        for path, held in self._files.items():
            if path.is_file() and path.stat().st_size != held:
                raise DataError(
                    f"The journal of steps {path} was changed by another process. Two processes must not go on with "
                    "the same run at once: stop one of them, and resume from the newest checkpoint."
                )
            self._write(path, [line])

    def _write(self, path: Path, lines: list[bytes]) -> None:
        if lines:
            self._files[path] += _append(path, b"".join(lines))


def _append(path: Path, line: bytes) -> int:
    """Bring a line to disk; returns how many bytes were added."""
    try:
        # Never a new file: that one would lack the earlier steps.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError("the disk is full")
            os.fsync(descriptor)
            return len(line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _not_written(path, error) from error


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _step_line(name: str, step: _Step) -> bytes:
    return _line({"step": name, **dict(zip(_NAMES, step, strict=True))})


def _steps(path: Path) -> _Steps:
    steps = [entry for entry in _entries(path) if "folder" not in entry]
    return {entry["step"]: (entry["noise_multiplier"], entry["sample_rate"]) for entry in steps}


def _entries(path: Path) -> list[dict[str, Any]]:
    """The lines; one that a power failure has cut short counts as a step like its neighbour."""
    entries = [_entry(line) for line in path.read_bytes().split(b"\n") if line]
    steps = [entry for entry in entries if entry is not None and "folder" not in entry]
    if None in entries and not steps:
        raise DataError(
            f"The journal of steps {path} cannot be read, so it is unknown how many steps ran after the checkpoint. "
            "Restore the file from a copy."
        )
    found: list[dict[str, Any]] = []
    like = steps[0] if steps else {}
    for entry in entries:
        if entry is not None and "folder" not in entry:
            like = entry
        found.append({**like, "step": f"{path} {len(found)}"} if entry is None else entry)
    return found


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        if "folder" in entry:
            return {"folder": str(entry["folder"])}
        return {"step": str(entry["step"]), **{name: float(entry[name]) for name in _NAMES}}
    except (ValueError, TypeError, KeyError):
        return None


def _not_written(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The journal of steps {path} cannot be written ({error.strerror or error}), and a step that is not recorded "
        "must not be taken. Free some space, or choose another folder (trainer.default_root_dir)."
    )
