"""The ``dpl`` command. Commands are imported when they are called, so that help and light commands answer at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FrameType

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
  sweep     the runs of a grid: dpl sweep configs/sweeps/digits.yaml
  report    the tables and figures of a grid's runs, beside the paper's numbers
  analyze   signal and noise of a run's gradients: dpl analyze snr --config configs/digits.yaml

`dpl COMMAND --help` shows the options of a command. Every setting of a configuration can be overridden on the command
line, as in `dpl fit --config configs/digits.yaml --privacy.target_epsilon 8`, and several --config files compose.
"""

_TRAINING = ("fit", "validate", "test", "predict")
_OTHERS = ("export", "verify", "audit", "account", "sweep", "report", "analyze")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 2 and one message on an error that the user can act on.

    Args:
        argv: what follows ``dpl``; None is the process's own, which then is the command's alone.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return
    command = arguments[0]
    if command in ("-V", "--version", "version"):
        print(f"dp-lightning {__version__}")
        return
    if command not in (*_TRAINING, *_OTHERS):
        print(f"dpl: there is no command '{command}'. `dpl --help` names them all.", file=sys.stderr)
        sys.exit(2)
    try:
        with _exit_codes(put_back=argv is not None) if command in _TRAINING else nullcontext():
            import_module(f"dp_lightning.commands.{'training' if command in _TRAINING else command}").main(arguments)
    except DpLightningError as error:
        print(f"\ndpl {command}: error: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _exit_codes(*, put_back: bool) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the process with 143 and 130 from now on, without a traceback.

    Nothing is lost by that: before a fit there is nothing to save, and during one `Interruption` has the signals.

    Args:
        put_back: whether they do what they did before, at the end.
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
    # An exception here could be lost, as in an import that catches all of them.
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # they fail where the signal has come in the middle of a print
        os._exit(128 + number)
