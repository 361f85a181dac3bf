"""What the screen of a run shows, as lines of text of a given width; nothing here writes."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dp_lightning.foreign_text import printable

# Columns of the bar: none below the first number, at most the second.
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
_MOST_LINES = 4


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: logical steps taken, those of earlier parts of the run included.
        num_steps: T.
        epoch: number of the current epoch, from 1.
        num_epochs: how many there are.
        part: what is being done inside of the step or the evaluation, such as ``batch 3 of 9``.
        fraction: of the current step that is done, from 0 to 1.
        epsilon: upper bound of what is spent; None for a run without noise.
        target: epsilon that the run may spend.
        accuracies: the last ones by name.
        losses: other numbers by name; those of raw training examples are named ``unprotected/...``.
        seconds: since the fit began.
        seconds_left: an estimate; None where there is none yet.
    """

    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    part: str = ""
    fraction: float = 0.0
    epsilon: float | None = None
    target: float = 0.0
    accuracies: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_left: float | None = None


def live_lines(progress: Progress, width: int, *, ascii_only: bool = False) -> list[str]:
    """Two to four lines for a terminal: steps and time, then the budget, then accuracies, and losses last.

    Args:
        progress: of the run.
        width: columns; no line is wider.
        ascii_only: for terminals that show nothing else.
    """
    steps = f"step {progress.step}/{progress.num_steps}"
    before = "  ".join(filter(None, [steps, progress.part]))
    after = f"{duration(progress.seconds)} elapsed"
    if progress.seconds_left is not None:
        after += f", {duration(progress.seconds_left)} left"
    room = min(width - len(before) - len(after) - 4, _LONGEST_BAR)
    done = (progress.step + progress.fraction) / max(progress.num_steps, 1)
    bar = _bar(done, room, ascii_only=ascii_only) if room >= _SHORTEST_BAR else ""
    first = _in_lines([part for part in (before, bar, after) if part], width)
    rest = _in_lines([f"epoch {progress.epoch}/{progress.num_epochs}", *_numbers(progress, losses=True)], width)
    return [*first, *rest][:_MOST_LINES]


def log_line(progress: Progress, clock: str) -> str:
    """One line for a file: no losses, since a log is kept and passed on.

    Args:
        progress: of the run.
        clock: the time of day.
    """
    parts = [
        clock,
        f"epoch {progress.epoch}/{progress.num_epochs}",
        f"step {progress.step}/{progress.num_steps}",
        *_numbers(progress, losses=False),
    ]
    if progress.seconds_left:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


def block(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Rows of a label and a text, which is wrapped beside it.

    Args:
        rows: labels and texts, which may be foreign.
        width: columns; only a word that is longer, such as a path, exceeds them.
    """
    shown = [(label, printable(text)) for label, text in rows if text]
    column = max((len(label) for label, _ in shown), default=0) + 2
    lines = []
    for label, text in shown:
        lines += textwrap.wrap(
            text,
            max(width, column + 20),
            initial_indent=f"{label:<{column}}",
            subsequent_indent=" " * column,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def duration(seconds: float) -> str:
    """Such as 0:41, 2:03:10 or 3 d 04:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(progress: Progress, *, losses: bool) -> list[str]:
    parts = []
    if progress.epsilon is not None:
        parts.append(f"epsilon at most {progress.epsilon:.2f} of {progress.target:.2f}")
    parts += [f"{printable(name)} {value:.3f}" for name, value in progress.accuracies.items()]
    if losses:
        parts += [f"{printable(name)} {value:#.3g}" for name, value in progress.losses.items()]
    return parts


def _in_lines(parts: Sequence[str], width: int) -> list[str]:
    """The parts, two spaces apart, as many on a line as fit."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(longer) > width and lines[-1]:
            lines.append(part[:width])
        else:
            lines[-1] = longer[:width]
    return lines


def _bar(done: float, width: int, *, ascii_only: bool) -> str:
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    count = int(min(max(done, 0.0), 1.0) * width)
    return full * count + empty * (width - count)
