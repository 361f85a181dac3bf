"""The ``dpl`` command. Commands are imported when they are called, so that help and light commands answer at once."""

import gc
import os
import platform
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from dp_lightning import __version__
from dp_lightning.errors import DpLightningError, did_you_mean

_COMMANDS = {
    "init": "look at your images and write a configuration for them: dpl init photos",
    "pretrain": "train a network on images from random processes, as a start that no data was used for",
    "fit": "train privately from a configuration: dpl fit --config configs/digits.yaml",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test set",
    "predict": "write the class probabilities that a checkpoint predicts",
    "export": "write the network of a checkpoint as safetensors and ONNX, with its privacy statement",
    "verify": "check a run's statement against its journal and its weights: dpl verify RUN",
    "audit": "test the noise and the clipping of a configuration: dpl audit --config configs/digits.yaml",
    "plan": "compare batch sizes, epochs and epsilons before a run: dpl plan --config configs/digits.yaml",
    "account": "price a run before it starts, or add up what runs have spent: dpl account RUN1 RUN2",
    "sweep": "run a grid: dpl sweep configs/grids/digits.yaml",
    "report": "write a run as a page: dpl report RUN; or tables and figures of a grid: dpl report GRID.yaml",
    "configs": "list the configurations of this package, print one, or copy them to a folder",
    "analyze": "measure signal and noise of a run's gradients: dpl analyze snr --config configs/digits.yaml",
    "doctor": "check this machine: versions, devices, and one private step against a loop over examples",
}

_HELP = f"""dp-lightning {__version__}: differentially private training of vision models

usage: dpl COMMAND [options]

commands:
{chr(10).join(f"  {name:9} {what}" for name, what in _COMMANDS.items())}

`dpl COMMAND --help` shows the options of a command, `dpl --version` the versions of dp-lightning, Python and torch.
Every setting of a configuration can be overridden on the command line, as in `dpl fit --config configs/digits.yaml
--privacy.target_epsilon 8`, and --config can be repeated.

exit codes: 0 done; 1 a check does not hold, or a run of a grid has failed; 2 an error, with what to change;
130 and 143 after Ctrl-C and SIGTERM
"""

_TRAINING = ("fit", "validate", "test", "predict")
# They answer at once. `doctor` also runs where packages are missing.
_LIGHT = ("account", "report", "configs", "doctor")
# Number of turns of a loop for which a thread of torch waits for another one before it sleeps: microseconds instead of
# milliseconds. Where processes share cores, such as two runs on one machine, waiting threads otherwise take the time of
# those that they wait for (`docs/performance.md`). GNU OpenMP reads this when torch is imported.
_SPINS = "10000"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 2 and one message on an error that the user can act on.

    Args:
        argv: what follows ``dpl``; None takes ``sys.argv``, and ends the process with 143 on SIGTERM and 130 on Ctrl-C.
    """
    if argv is None:
        # Nothing is lost: files are complete or absent, a fit handles the signals itself, a sweep stops its runs.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return
    command = arguments[0]
    if command in ("-V", "--version", "version"):
        # The version of torch is that of its metadata, since importing torch takes seconds.
        print(f"dp-lightning {__version__}, Python {platform.python_version()}, torch {version('torch')}")
        return
    if command not in _COMMANDS:
        near = did_you_mean(command, _COMMANDS)
        print(f"dpl: there is no command '{command}'.{near} `dpl --help` lists the commands.", file=sys.stderr)
        sys.exit(2)
    try:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        if command not in _LIGHT:
            import_module("dp_lightning.cores").respect_quota()
        module = f"dp_lightning.commands.{'training' if command in _TRAINING else command}"
        (_imported(module) if argv is None else import_module(module)).main(arguments)
    except DpLightningError as error:
        told, kind = str(error), type(error)
        if re.match(r"Caught \w+ in DataLoader worker process", told):  # the message stands after a traceback
            told = told.rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()
        print("\n".join([f"\ndpl {command}: error: {told}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        sys.exit(2)


def _imported(name: str) -> Any:
    """The module. Nobody looks for garbage in it: that takes two seconds, most of them when the process ends."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()
