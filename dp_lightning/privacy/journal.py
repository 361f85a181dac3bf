"""The journal of a run: one line per logical step, on disk before the step's result is used.

A checkpoint holds the ledger as it stood when the checkpoint was written. Steps that ran after it and were lost in a
crash are spent too, and only the journal has them. Every folder that holds a checkpoint of the run has a journal; each
only ever grows, and names the others.

A step's name is a hash of its numbers and of the names of the last steps before it. So an edited line does not match
its name, and a removed line is missed by those after it. The names of the last steps, the heads, stand for all steps: a
checkpoint and a statement hold them. Someone who rewrites all of these files can make them agree.
"""

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The journals in a folder, of any run."""
    return sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}"))


def run_of(journal: Path) -> str:
    """Name of the run whose steps a journal holds."""
    return journal.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


@dataclass(frozen=True)
class Step:
    """A line of a journal.

    Attributes:
        number: how many steps there are with it.
        after: names of the last steps before it.
        nonce: tells it from another step after the same ones.
    """

    noise_multiplier: float
    sample_rate: float
    number: int
    after: tuple[str, ...]
    nonce: str

    @property
    def spent(self) -> tuple[float, float]:
        """What the ledger counts."""
        return self.noise_multiplier, self.sample_rate

    def name(self, run: str) -> str:
        """The name by which other steps and the heads refer to it."""
        content = json.dumps([run, *vars(self).values()])
        return hashlib.sha256(content.encode()).hexdigest()[:_NAME_LENGTH]


Steps = dict[str, Step]
"""By their names, each behind those that it comes after."""


def heads_of(steps: Mapping[str, Step]) -> tuple[str, ...]:
    """The names of the steps that no other one comes after."""
    return tuple(sorted(steps.keys() - {name for step in steps.values() for name in step.after}))


def up_to(heads: Iterable[str], steps: Mapping[str, Step]) -> Steps:
    """The steps that these heads stand for, as far as they are there."""
    wanted = set(heads)
    for name in reversed(list(steps)):
        if name in wanted:
            wanted.update(steps[name].after)
    return {name: step for name, step in steps.items() if name in wanted}


def spent_in(steps: Mapping[str, Step]) -> Counter[tuple[float, float]]:
    """How many steps there are of each noise multiplier and sample rate."""
    return Counter(step.spent for step in steps.values())


def journal_of(steps: Mapping[str, Step]) -> bytes:
    """A journal with these steps, and no folder."""
    return b"".join(_line({"step": name, **vars(step)}) for name, step in steps.items())


class Journal:
    """Records the steps of one run in all folders that it was given.

    Args:
        run: name of the run, part of the files' names.

    Attributes:
        steps: every step that one of the files holds.
        heads: the names of the last steps, which stand for all.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.steps: Steps = {}
        self.heads: tuple[str, ...] = ()
        self._sizes: dict[Path, int] = {}  # of the files, in bytes

    @property
    def ledger(self) -> Ledger:
        """The steps as a ledger."""
        ledger = Ledger()
        ledger.load_state_dict({"runs": [[*spent, count] for spent, count in spent_in(self.steps).items()]})
        return ledger

    def path(self, folder: Path) -> Path:
        """Where the journal stands in a folder."""
        return folder.resolve() / journal_name(self.run)

    def add_folder(self, folder: Path, ledger: Ledger | None = None) -> None:
        """Record in ``folder`` too, and in all folders that a journal there names, from now on.

        A step that one of the files holds counts, and each of them gets those that it lacks: a process may have been
        killed after it wrote to one of them.

        Args:
            ledger: steps that count, whether or not a file holds them.

        Raises:
            DataError: when a file cannot be read or written.
        """
        path = self.path(folder)
        if path in self._sizes:
            return
        folders = {str(known.parent) for known in self._sizes}
        held = {known: (set(self.steps), folders) for known in self._sizes}
        waiting = [path]
        for place in waiting:  # which grows by those that each of them names
            if place.is_file():
                steps, named = read_journal(place, self.run)
                held[place] = set(steps), set(named)
                self.steps |= steps
                others = dict.fromkeys(self.path(Path(name)) for name in named)
                waiting += [other for other in others if other not in held and other not in waiting]
        held.setdefault(path, (set(), set()))
        self.heads = heads_of(self.steps)
        if ledger is not None:
            for spent in (ledger.totals - spent_in(self.steps)).elements():
                self._add(self._next(*spent))
        for place, (names, named_there) in held.items():
            lacking = {name: step for name, step in self.steps.items() if name not in names}
            unnamed = {str(other.parent) for other in held if other != place}.difference(named_there)
            self._append(place, journal_of(lacking) + b"".join(_line({"folder": other}) for other in sorted(unnamed)))

    def record(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Write one step to disk, in every folder.

        Raises:
            DataError: when one of them cannot be written; the step must not be released.
        """
        step = self._next(noise_multiplier, sample_rate)
        line = journal_of({step.name(self.run): step})
        for path, size in self._sizes.items():
            if path.is_file() and path.stat().st_size != size:
                raise DataError(
                    f"The journal of steps {path} was changed by another process. Two processes must not run "
                    "the same run at once: stop one of them, and resume from the newest checkpoint."
                )
            self._append(path, line)
        self._add(step)

    def _next(self, noise_multiplier: float, sample_rate: float) -> Step:
        return Step(noise_multiplier, sample_rate, len(self.steps) + 1, self.heads, secrets.token_hex(8))

    def _add(self, step: Step) -> None:
        self.heads = (step.name(self.run),)
        self.steps[self.heads[0]] = step

    def _append(self, path: Path, lines: bytes) -> None:
        """Bring lines to disk; a line there that was cut short stays a line of its own."""
        try:
            if path not in self._sizes and not path.is_file():
                with replacing(path) as file:
                    file.write(lines)
            else:  # never a new file: that one would lack the earlier steps
                with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                    if path not in self._sizes and path.read_bytes()[-1:] not in (b"", b"\n"):
                        lines = b"\n" + lines
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
            self._sizes[path] = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"The journal of steps {path} cannot be written ({error.strerror or error}), and a step that is not "
                "recorded must not be taken. Free some space, or choose another folder (trainer.default_root_dir)."
            ) from error


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def read_journal(path: Path, run: str) -> tuple[Steps, list[str]]:
    """The steps of a journal, and the folders that it names.

    A line that a power failure has cut short counts as a step like its neighbour.

    Raises:
        DataError: where lines were edited or are missing.
    """
    lines = [_parsed(line) for line in path.read_bytes().split(b"\n") if line]
    like = next((line[1] for line in lines if isinstance(line, tuple)), None)
    steps: Steps = {}
    missing: set[str] = set()
    last: tuple[str, ...] = ()
    for number, line in enumerate(lines):
        if isinstance(line, str):
            continue
        if line is not None:
            claimed, step = line
            if claimed != step.name(run):
                raise _edited(path, f"line {number + 1} does not match its name: it was edited")
        elif like is not None:
            step = Step(*like.spent, len(steps) + 1, last, f"line {number} of {path}")
            claimed = step.name(run)
        else:
            raise DataError(
                f"The journal of steps {path} cannot be read, so it is unknown how many steps ran after the "
                "checkpoint. Restore the file from a copy."
            )
        if step.number > len(steps) + 1:
            raise _edited(path, f"line {number + 1} is of step {step.number}, and {len(steps)} stand before it")
        missing.update(other for other in step.after if other not in steps)
        last, steps[claimed], like = (claimed,), step, step
    if len(missing) > lines.count(None):
        raise _edited(
            path, f"{len(missing)} steps are missing that others come after: {', '.join(sorted(missing)[:3])}"
        )
    return steps, [line for line in lines if isinstance(line, str)]


def _parsed(line: bytes) -> str | tuple[str, Step] | None:
    """A folder, or a step with the name that it claims; None where it cannot be read."""
    try:
        entry = json.loads(line)
        if "folder" in entry:
            return str(entry["folder"])
        numbers = float(entry["noise_multiplier"]), float(entry["sample_rate"])
        after = tuple(map(str, entry["after"]))
        return str(entry["step"]), Step(*numbers, int(entry["number"]), after, str(entry["nonce"]))
    except (ValueError, TypeError, KeyError):
        return None


def _edited(path: Path, what: str) -> DataError:
    return DataError(
        f"The journal of steps {path} is not as it was written: {what}. What this run has spent is unknown. Restore "
        "the file from a copy."
    )
