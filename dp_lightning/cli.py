"""The ``dpl`` command. Commands are imported when they are called, so that help and light commands respond at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import TextIO

from dp_lightning import __version__
from dp_lightning.errors import DpLightningError

_HELP = f"""dp-lightning {__version__}: differentially private training of vision models

usage: dpl COMMAND [options]

commands:
  fit       train privately from a configuration: dpl fit --config configs/digits.yaml
  validate  evaluate a checkpoint on the validation split
  test      evaluate a checkpoint on the test set
  predict   class probabilities of a checkpoint
  export    the network of a checkpoint as safetensors and ONNX, with its privacy statement
  verify    check a run's statement against its journal and its weights: dpl verify RUN
  audit     test the noise and the clipping of a configuration: dpl audit --config configs/digits.yaml
  account   price a run before it starts: three of epsilon, sigma, steps and batch size give the fourth
  sweep     the runs of a grid: dpl sweep configs/grids/digits.yaml
  report    the tables and figures of a grid's runs, beside the paper's numbers
  analyze   signal and noise of a run's gradients: dpl analyze snr --config configs/digits.yaml

`dpl COMMAND --help` shows the options of a command. Every setting of a configuration can be overridden on the command
line, as in `dpl fit --config configs/digits.yaml --privacy.target_epsilon 8`, and several --config files compose.

exit codes: 0 success; 1 a check does not hold, or a run of a grid failed; 2 an error, and how to fix it;
74 the output cannot be written; 130 and 143 after Ctrl-C and SIGTERM
"""

_TRAINING = ("fit", "validate", "test", "predict")
_OTHERS = ("export", "verify", "audit", "account", "sweep", "report", "analyze")
# EX_IOERR of sysexits.h. 1 would mean a check that does not hold, and 128 and above a signal.
_UNWRITTEN = 74


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 2 and one message on an error that the user can act on.

    SIGTERM and Ctrl-C end it with 143 and 130, and output that cannot be written with 74, all without a traceback.

    Args:
        argv: the arguments after ``dpl``; None uses those of the process, and leaves its signal handlers changed.
    """
    with _ended_by_signals(put_back=argv is not None), _output_written():
        _run(list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return
    command = arguments[0]
    if command in ("-V", "--version", "version"):
        print(f"dp-lightning {__version__}")
        return
    if command not in (*_TRAINING, *_OTHERS):
        print(f"dpl: there is no command '{command}'. `dpl --help` lists the commands.", file=sys.stderr)
        sys.exit(2)
    try:
        import_module(f"dp_lightning.commands.{'training' if command in _TRAINING else command}").main(arguments)
    except DpLightningError as error:
        print(f"\ndpl {command}: error: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _ended_by_signals(*, put_back: bool) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process with 143 and 130 from now on, without a traceback.

    Nothing is lost: files are either complete or absent, `StopOnSignal` handles the signals during a fit, and a sweep
    handles them itself while it has runs.

    Args:
        put_back: whether the previous handlers are restored at the end.
    """
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        if put_back:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    # An exception raised here could be lost, for example in an import that catches all of them.
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # they fail if the signal came in the middle of a print
        os._exit(128 + number)


@contextmanager
def _output_written() -> Iterator[None]:
    """End the process with 74 if its output cannot be written, to a full disk or into a pipe that nobody reads."""
    try:
        try:
            yield
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed from the start
                stream.flush()
    except OSError as error:
        broken = [stream for stream in filter(None, (sys.stdout, sys.stderr)) if not _takes(stream)]
        if not broken:
            raise
        with suppress(OSError):
            print(f"dpl: error: the output cannot be written ({error.strerror}).", file=sys.stderr)
        for stream in broken:  # what is left in it would fail again when Python exits
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        sys.exit(_UNWRITTEN)


def _takes(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True
