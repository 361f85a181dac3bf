"""Where the screen of a run is written: lines that stay and, on a terminal, lines that change in place."""

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

# Seconds between two refreshes.
_REFRESH = 0.25
# Columns where there is no terminal.
_WIDTH = 80


class Terminal:
    """Standard output. If it is no terminal, as a file or the log of a container, it gets plain lines only.

    No thread refreshes the lines that change: code of the run does, between two physical batches.

    Args:
        file: to write to; None is standard output.

    Attributes:
        is_live: whether lines can change in place.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self.is_live = self._file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        # Variables such as FORCE_COLOR would have escape codes written into files.
        self._console = Console(file=self._file, force_terminal=self.is_live, highlight=False, markup=False)
        self._live: Live | None = None
        self._shown = 0.0

    @property
    def width(self) -> int:
        """Columns that a line may have; the last one of a terminal is left free."""
        return self._console.width - 1 if self.is_live else _WIDTH

    @property
    def ascii_only(self) -> bool:
        """Whether other characters cannot be shown."""
        return self._console.options.ascii_only

    def say(self, lines: Sequence[str]) -> None:
        """Write lines that stay, above those that change."""
        for line in lines:
            print(line, file=sys.stdout if self._live else self._file)
        self._file.flush()

    @property
    def is_due(self) -> bool:
        """Whether the lines that change should be shown anew: on a terminal, some time after the last time."""
        return self.is_live and time.monotonic() - self._shown >= _REFRESH

    def show(self, lines: Sequence[str]) -> None:
        """Show lines in place of those before, on a terminal.

        Args:
            lines: none wider than ``width``.
        """
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not do it
        self._live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
        self._shown = time.monotonic()

    def close(self) -> None:
        """Take away the lines that change."""
        if self._live is not None:
            self._live.stop()
            self._live = None
