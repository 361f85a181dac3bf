"""The journal of a run: one line per logical step, on disk before the step's result is used.

A checkpoint holds the ledger as it stood when the checkpoint was written. Steps that ran after it and were lost in a
crash are spent too, and only the journal has them. Every folder that holds a checkpoint of the run has a journal, and
each step goes into all of them.

A step's name is a hash of its numbers and of the name of the step before it. So an edited line does not match its
name, and a removed line is missed by the next one. The name of the last step, the head, stands for all steps: a
checkpoint and a statement hold it. Someone who rewrites all of these files can make them agree.
"""

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dp_lightning.atomic_files import replacing
from dp_lightning.errors import DataError
from dp_lightning.privacy.accounting import Ledger

_NAME_LENGTH = 32  # hexadecimal digits, 128 bits
_PREFIX, _SUFFIX = "privacy_journal_", ".jsonl"


def run_name() -> str:
    """A new name for a run."""
    return secrets.token_hex(8)


def journal_name(run: str) -> str:
    """The name of a run's journal in each folder."""
    return f"{_PREFIX}{run}{_SUFFIX}"


def journals_in(folder: Path) -> list[Path]:
    """The journals at or below a folder, of any run."""
    return sorted(folder.rglob(journal_name("*")))


def run_of(journal: Path) -> str:
    """Name of the run whose steps a journal holds."""
    return journal.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


@dataclass(frozen=True)
class Step:
    """A line of a journal.

    Attributes:
        place: place of the step in its round, from 0 on.
        nonce: random text that tells two steps after the same step apart.
    """

    noise_multiplier: float
    sample_rate: float
    place: int
    nonce: str

    def name(self, run: str, before: str) -> str:
        """The name of this step after the one named ``before``, which is empty for the first step."""
        content = json.dumps([run, before, *vars(self).values()])
        return hashlib.sha256(content.encode()).hexdigest()[:_NAME_LENGTH]


Steps = dict[str, Step]
"""Steps by their names, in the order in which they were taken."""


def up_to(head: str, steps: Mapping[str, Step]) -> Steps:
    """The steps up to the one that is named ``head``; none if no step has this name."""
    names = list(steps)
    return {name: steps[name] for name in names[: names.index(head) + 1]} if head in steps else {}


def spent_in(steps: Iterable[Step]) -> Counter[tuple[float, float]]:
    """How many rounds there are of each noise multiplier and sample rate."""
    return Counter((step.noise_multiplier, step.sample_rate) for step in steps if step.place == 0)


def journal_of(steps: Mapping[str, Step]) -> bytes:
    """A journal of these steps."""
    return b"".join(json.dumps({"step": name, **vars(step)}).encode() + b"\n" for name, step in steps.items())


def read_journal(path: Path, run: str) -> Steps:
    """The steps of a journal.

    A line that was cut short is no step: the process that wrote the line was stopped before it released the step.

    Raises:
        DataError: where a line was edited or is missing.
    """
    steps: Steps = {}
    name = ""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            entry = json.loads(line)
            sigma, q = float(entry["noise_multiplier"]), float(entry["sample_rate"])
            step, claimed = Step(sigma, q, int(entry["place"]), str(entry["nonce"])), entry["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if claimed != (name := step.name(run, name)):
            raise DataError(
                f"The journal of steps {path} is not as it was written: line {number} does not follow from those "
                "before it. What this run has spent is unknown. Restore the file from a copy."
            )
        steps[name] = step
    return steps


class Journal:
    """Records the steps of one run in every folder that was added.

    Args:
        run: name of the run, part of the files' names.

    Attributes:
        steps: every step of the run.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.steps: Steps = {}
        self._files: dict[Path, tuple[int, int]] = {}  # how many steps and bytes each file has

    @property
    def head(self) -> str:
        """The name of the last step; empty before the first one."""
        return next(reversed(self.steps), "")

    @property
    def ledger(self) -> Ledger:
        """The steps as a ledger."""
        ledger, rounds = Ledger(), spent_in(self.steps.values())
        ledger.load_state_dict({"runs": [[*kind, count] for kind, count in rounds.items()], "steps": len(self.steps)})
        return ledger

    def path(self, folder: Path) -> Path:
        """The path of the run's journal in a folder."""
        return folder.resolve() / journal_name(self.run)

    def add_folder(self, folder: Path, ledger: Ledger | None = None) -> None:
        """Record in ``folder`` too from now on; steps that only the journal in this folder holds count as well.

        Args:
            ledger: steps that count, whether or not a file holds them.

        Raises:
            DataError: when a file cannot be read or written, or the journal in the folder has steps of another fit.
        """
        path = self.path(folder)
        if path in self._files:
            return
        there = read_journal(path, self.run) if path.is_file() else {}
        known, more = sorted((self.steps, there), key=len)
        if known and next(reversed(known)) not in more:
            raise DataError(
                f"The journal of steps {path} has steps of another fit, which resumed from an earlier checkpoint of "
                "this run. Choose another folder (trainer.default_root_dir, or dirpath of ModelCheckpoint)."
            )
        self.steps = dict(more)
        if ledger is not None:
            for kind in (ledger.totals - spent_in(self.steps.values())).elements():
                self._add(*kind, place=0)
        self._append(path, len(there))
        for known_path, (held, _) in self._files.items():
            self._append(known_path, held)

    def record(self, *, noise_multiplier: float, sample_rate: float, place: int = 0) -> None:
        """Write one step to disk, in every folder, the ``place``-th of its round.

        Raises:
            DataError: when a file cannot be written; the step must not be released.
        """
        for path, (_, size) in self._files.items():
            if path.is_file() and path.stat().st_size != size:
                raise DataError(
                    f"The journal of steps {path} was changed by another process. Two processes must not run "
                    "the same run at once: stop one of them, and resume from the newest checkpoint."
                )
        self._add(noise_multiplier, sample_rate, place)
        for path, (count, _) in self._files.items():
            self._append(path, count)

    def _add(self, noise_multiplier: float, sample_rate: float, place: int) -> None:
        step = Step(noise_multiplier, sample_rate, place, secrets.token_hex(8))
        self.steps[step.name(self.run, self.head)] = step

    def _append(self, path: Path, count: int) -> None:
        """Append the steps after the first ``count`` to a file, on a new line where its last line was cut short."""
        lines = journal_of(dict(islice(self.steps.items(), count, None)))
        try:
            if path not in self._files and not path.is_file():
                with replacing(path) as file:
                    file.write(lines)
            else:  # never a new file: that one would lack the earlier steps
                with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                    if path not in self._files and path.read_bytes()[-1:] not in (b"", b"\n"):
                        lines = b"\n" + lines
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
            self._files[path] = len(self.steps), path.stat().st_size
        except OSError as error:
            raise DataError(
                f"The journal of steps {path} cannot be written ({error.strerror or error}), and a step that is not "
                "recorded must not be taken. Free some space, or choose another folder (trainer.default_root_dir)."
            ) from error
