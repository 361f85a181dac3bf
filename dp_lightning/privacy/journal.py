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

from dp_lightning.atomic_files import replacing, require_regular
from dp_lightning.errors import DataError
from dp_lightning.privacy.accounting import Ledger, Run

_NAME_LENGTH = 32  # hexadecimal digits, 128 bits
_LARGEST = 2**30  # bytes, of some five million steps
_PREFIX, _SUFFIX = "privacy_journal_", ".jsonl"


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


def run_name(earlier: Mapping[str, Iterable[Run]], token: str | None = None) -> str:
    """A new name for a run; where weights had taken steps before, it stands for them too.

    Args:
        earlier: the steps of earlier runs by their names.
        token: what tells it from other runs; None for a new one.
    """
    token = token or secrets.token_hex(8)
    if not earlier:
        return token
    content = json.dumps([token, {name: [list(run) for run in runs] for name, runs in sorted(earlier.items())}])
    return f"{token}-{hashlib.sha256(content.encode()).hexdigest()[:_NAME_LENGTH]}"


def stands_for(run: str, earlier: Mapping[str, Iterable[Run]]) -> bool:
    """Whether the name of a run is that of a run after these steps."""
    return run == run_name(earlier, run.partition("-")[0])


Steps = dict[str, Step]
"""By their names, each behind those that it comes after."""


Lines = dict[bytes, tuple[str, Step]]
"""Lines that match their names, and what they say."""


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


def journal_of(steps: Mapping[str, Step]) -> bytes:
    """A journal with these steps, and no folder."""
    return b"".join(map(_step_line, steps, steps.values()))


def journal_name(run: str) -> str:
    """The name of a run's journal in each folder."""
    return f"{_PREFIX}{run}{_SUFFIX}"


class Journal:
    """Records the steps of one run in all folders that it was given.

    Args:
        run: name of the run, part of the files' names.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._files: dict[Path, int] = {}  # with the bytes that each holds
        self._spent: Counter[tuple[float, float]] = Counter()
        self._checked: Lines = {}  # until the first step; after many resumes, many files hold the same ones
        #: The names of the last steps, which stand for all.
        self.heads: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger:
        """Every step that one of the journals holds."""
        ledger = Ledger()
        ledger.load_state_dict({"runs": [[*spent, count] for spent, count in self._spent.items()]})
        return ledger

    def missing(self, heads: Iterable[str]) -> list[str]:
        """Those of these steps that it does not hold."""
        steps = self._held()
        return [name for name in heads if name not in steps]

    def path(self, folder: Path) -> Path:
        """Where the journal stands in a folder."""
        return folder.resolve() / journal_name(self.run)

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
        known, steps = [path], self._held()
        for place in known:  # which grows by those that each of them names
            if place.is_file():
                held, folders = read_journal(place, self.run, self._checked)
                steps |= held
                self._take(place)
                named = [self.path(Path(folder)) for folder in folders]
                known += [other for other in dict.fromkeys(named) if other not in known]
        self._count(steps)
        self._complete(steps)
        return self.ledger

    def add_folder(self, folder: Path, ledger: Ledger) -> None:
        """Keep a journal in ``folder`` too, with all steps so far; one that stands there gets those that it lacks.

        Raises:
            DataError: when it cannot be read or written.
        """
        path = self.path(folder)
        if path in self._files:
            return
        steps = self._held()
        if path.is_file():
            steps |= read_journal(path, self.run, self._checked)[0]
        self._count(steps)
        for spent in (ledger.totals - self._spent).elements():
            step = self._next(*spent)
            self._add(step)
            steps[self.heads[0]] = step
        folders = [_line({"folder": str(known.parent)}) for known in self._files]
        stood = path.is_file()
        if not stood:
            try:
                with replacing(path) as file:
                    file.writelines([*map(_step_line, steps, steps.values()), *folders])
            except OSError as error:
                raise _not_written(path, error) from error
        self._append(_line({"folder": str(path.parent)}))
        self._take(path)
        self._write(path, folders if stood else [])
        self._complete(steps)

    def record(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Write one step to disk, in every folder.

        Raises:
            DataError: when one of them cannot be written; the step must not be released.
        """
        self._checked.clear()
        step = self._next(noise_multiplier, sample_rate)
        self._append(_step_line(step.name(self.run), step))
        self._add(step)

    def _next(self, noise_multiplier: float, sample_rate: float) -> Step:
        return Step(noise_multiplier, sample_rate, self._spent.total() + 1, self.heads, secrets.token_hex(8))

    def _add(self, step: Step) -> None:
        self.heads = (step.name(self.run),)
        self._spent[step.spent] += 1

    def _count(self, steps: Steps) -> None:
        self.heads, self._spent = heads_of(steps), spent_in(steps)

    def _held(self) -> Steps:
        """All steps that are recorded."""
        steps: Steps = {}
        for path in self._files:
            try:
                steps |= read_journal(path, self.run, self._checked)[0]
            except OSError as error:
                raise DataError(
                    f"The journal of steps {path} cannot be read any more ({error.strerror or error}). Put it back: "
                    "the run cannot resume without it."
                ) from error
        return steps

    def _take(self, path: Path) -> None:
        """Record in it from now on; a line that was cut short stays a line of its own."""
        if path not in self._files:
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                _append(path, b"\n")
            self._files[path] = path.stat().st_size

    def _complete(self, steps: Steps) -> None:
        """Give each file the steps that it lacks."""
        for path in self._files:
            held = read_journal(path, self.run, self._checked)[0]
            self._write(path, [_step_line(name, step) for name, step in steps.items() if name not in held])

    def _append(self, line: bytes) -> None:
        for path, held in self._files.items():
            if path.is_file() and path.stat().st_size != held:
                raise DataError(
                    f"The journal of steps {path} was changed by another process. Two processes must not run "
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


def _step_line(name: str, step: Step) -> bytes:
    return _line({"step": name, **vars(step)})


def spent_in(steps: Mapping[str, Step]) -> Counter[tuple[float, float]]:
    """How often each noise multiplier and sample rate."""
    return Counter(step.spent for step in steps.values())


def read_journal(path: Path, run: str, checked: Lines | None = None) -> tuple[Steps, list[str]]:
    """The steps of a journal, and the folders that it names.

    A line that a power failure has cut short counts as a step like its neighbour.

    Args:
        path: the journal.
        run: whose it is.
        checked: lines of this run's journals that were read before, which gets those of this one.

    Raises:
        DataError: where lines were edited or are missing.
    """
    require_regular(path)
    if (size := path.stat().st_size) > _LARGEST:
        raise DataError(f"The journal of steps {path} has {size:,} bytes; at most {_LARGEST:,} are read.")
    checked = {} if checked is None else checked
    texts = [text for text in path.read_bytes().split(b"\n") if text]
    lines = [checked.get(text) or _parsed(text) for text in texts]
    like = next((line for line in lines if isinstance(line, tuple)), None)
    if None in lines and like is None:
        raise DataError(
            f"The journal of steps {path} cannot be read, so it is unknown how many steps ran after the checkpoint. "
            "Restore the file from a copy."
        )
    steps: Steps = {}
    missing: set[str] = set()
    last: tuple[str, ...] = ()
    for number, (text, line) in enumerate(zip(texts, lines, strict=True)):
        if isinstance(line, str):
            continue
        if line is None:
            assert like is not None
            line = None, Step(*like[1].spent, len(steps) + 1, last, f"line {number} of {path}")
        claimed, step = like = line
        name = claimed if claimed is not None and text in checked else step.name(run)
        if claimed not in (None, name):
            raise _tampered(path, f"line {number + 1} does not match its name: it was edited")
        if step.number > len(steps) + 1:
            raise _tampered(path, f"line {number + 1} is of step {step.number}, and {len(steps)} stand before it")
        if claimed is not None:
            checked[text] = name, step
        missing.update(other for other in step.after if other not in steps)
        last, steps[name] = (name,), step
    if len(missing) > lines.count(None):
        raise _tampered(
            path, f"{len(missing)} steps are missing that others come after: {', '.join(sorted(missing)[:3])}"
        )
    return steps, [line for line in lines if isinstance(line, str)]


def _parsed(line: bytes) -> str | tuple[str | None, Step] | None:
    """A folder, or a step with the name that it claims; None where it cannot be read."""
    try:
        entry = json.loads(line)
        if "folder" in entry:
            return str(entry["folder"])
        numbers = float(entry["noise_multiplier"]), float(entry["sample_rate"])
        after = tuple(map(str, entry["after"]))
        return str(entry["step"]), Step(*numbers, int(entry["number"]), after, str(entry["nonce"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _tampered(path: Path, what: str) -> DataError:
    return DataError(
        f"The journal of steps {path} is not as it was written: {what}. What this run has spent is unknown. Restore "
        "the file from a copy."
    )


def _not_written(path: Path, error: OSError) -> DataError:
    return DataError(
        f"The journal of steps {path} cannot be written ({error.strerror or error}), and a step that is not recorded "
        "must not be taken. Free some space, or choose another folder (trainer.default_root_dir)."
    )
