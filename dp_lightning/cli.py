"""The ``dpl`` command. Commands are imported when they are called, so that help and light commands answer at once."""

import gc
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, TextIO

from dp_lightning import __version__
from dp_lightning.errors import DpLightningError

_HELP = f"""dp-lightning {__version__}: differentially private training of vision models

usage: dpl COMMAND [options]

commands:
  init      look at your images and write a configuration for them: dpl init photos
  pretrain  train a network on images from random processes, as a start that no data was used for
  fit       train privately from a configuration: dpl fit --config configs/digits.yaml
  validate  evaluate a checkpoint on the validation split
  test      evaluate a checkpoint on the test set
  predict   write the class probabilities that a checkpoint predicts
  export    write the network of a checkpoint as safetensors and ONNX, with its privacy statement
  verify    check a run's statement against its journal and its weights: dpl verify RUN
  audit     test the noise and the clipping of a configuration: dpl audit --config configs/digits.yaml
  plan      compare batch sizes, epochs and epsilons before a run: dpl plan --config configs/digits.yaml
  account   price a run before it starts: three of epsilon, sigma, steps and batch size give the fourth
  sweep     run a grid: dpl sweep configs/grids/digits.yaml
  report    write a run as a page: dpl report RUN; or tables and figures of a grid: dpl report GRID.yaml
  configs   list the configurations of this package, print one, or copy them to a folder
  analyze   measure signal and noise of a run's gradients: dpl analyze snr --config configs/digits.yaml
  doctor    check this machine: versions, devices, files, and one private step against a loop over examples

`dpl COMMAND --help` shows the options of a command, `dpl --version` the versions of dp-lightning, Python and torch.
Every setting of a configuration can be overridden on the command line, as in `dpl fit --config configs/digits.yaml
--privacy.target_epsilon 8`, and --config can be repeated.

exit codes: 0 done; 1 a check does not hold, or a run of a grid has failed; 2 an error, with what to change;
74 the output cannot be written; 130 and 143 after Ctrl-C and SIGTERM
"""

_TRAINING = ("fit", "validate", "test", "predict")
# fmt: off
_OTHERS = (
    "init", "pretrain", "export", "verify", "audit", "plan", "account", "sweep", "report", "configs", "analyze",
    "doctor",
)
# fmt: on
# They answer at once; the runs of a grid have processes of their own. `doctor` also runs where packages are missing.
_WITHOUT_TORCH = ("init", "account", "sweep", "report", "configs", "doctor")
# Turns of a loop, for which a thread waits before it sleeps.
_SPINS = "10000"
# EX_IOERR of sysexits.h. 1 would mean that a check does not hold, and 128 or more a signal.
_UNWRITTEN = 74


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 2 and one message on an error that the user can act on.

    It exits with 143 on SIGTERM, 130 on Ctrl-C and 74 if its output cannot be written, all without a traceback.

    Args:
        argv: what follows ``dpl``; None takes ``sys.argv``, and leaves the signal handlers in place at the end.
    """
    with _ended_by_signals(put_back=argv is not None), _output_written():
        _run(list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return
    command = arguments[0]
    if command in ("-V", "--version", "version"):
        print(f"dp-lightning {__version__}, Python {platform.python_version()}, {_torch()}")
        return
    if command not in (*_TRAINING, *_OTHERS):
        from dp_lightning.commands.near_names import did_you_mean

        near = did_you_mean(command, (*_TRAINING, *_OTHERS))
        print(f"dpl: there is no command '{command}'.{near} `dpl --help` lists the commands.", file=sys.stderr)
        sys.exit(2)
    try:
        if command in _TRAINING:
            arguments = _checked(arguments)
        _let_threads_give_way()
        if command not in _WITHOUT_TORCH:
            _imported("dp_lightning.cores").respect_quota()
        _imported(f"dp_lightning.commands.{'training' if command in _TRAINING else command}").main(arguments)
    except DpLightningError as error:
        told, kind = str(error), type(error)
        if re.match(r"Caught \w+ in DataLoader worker process", told):  # what was said stands after a traceback
            told = told.rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()
        print("\n".join([f"\ndpl {command}: error: {told}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        sys.exit(2)


def _let_threads_give_way() -> None:
    """Threads of torch that wait for each other sleep after some microseconds, and not milliseconds.

    Where processes share cores, such as two runs on one machine, waiting threads otherwise take the time of those that
    they wait for (`docs/performance.md`). GNU OpenMP reads this when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def _imported(name: str) -> Any:
    """The module.

    Raises:
        DpLightningError: naming a package that it needs and that is not installed.
    """
    with nullcontext() if name in sys.modules else _garbage_left():
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "dp_lightning"):
                raise
            raise DpLightningError(
                f"The package {package} is not installed. `dpl doctor`, or python -m dp_lightning doctor in the "
                "folder of the source, names all that are missing, and what installs them."
            ) from error


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Looking for garbage takes a fifth of the time of importing torch and Lightning, and finds none."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # All that was imported becomes part of the oldest generation, without a pass over it.
        gc.freeze()
        gc.unfreeze()
        gc.enable()


def _checked(arguments: list[str]) -> list[str]:
    """The arguments with the paths of configurations; misspelt names end the command before torch is imported."""
    from dp_lightning.commands.known_settings import require_known
    from dp_lightning.commands.named_configs import with_paths

    found = with_paths(arguments)
    require_known(found)
    return found


def _torch() -> str:
    # By its metadata: importing torch takes seconds.
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "torch is not installed"


@contextmanager
def _ended_by_signals(*, put_back: bool) -> Iterator[None]:
    """Within this context, SIGTERM and Ctrl-C end the process with 143 and 130, without a traceback.

    Nothing is lost: files are complete or absent, `StopOnSignal` handles the signals during a fit, and a sweep handles
    them itself while it has runs.

    Args:
        put_back: whether to restore the previous handlers at the end.
    """
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, partial(_leave, os.getpid())) for number in numbers}
    try:
        yield
    finally:
        if put_back:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(command: int, number: int, frame: FrameType | None) -> None:
    # An exception here could be lost, as in an import that catches all exceptions.
    try:
        if os.getpid() == command:  # and not a copy of it, such as a process that loads images
            print(f"\ndpl: stopped by {signal.Signals(number).name}.", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:  # flushing fails if the signal came during a print
        os._exit(128 + number)


@contextmanager
def _output_written() -> Iterator[None]:
    """End the process with 74 if output cannot be written, as on a full disk or into a pipe that nobody reads."""
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
