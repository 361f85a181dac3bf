"""What other packages print under `dpl` and nobody can use: advertisements, banners, and warnings about their own code.

Each entry names where a message comes from and what kind it is, and why it is left out. All other messages of these
packages are shown, and so is every warning of a user's code. A warning of dp_lightning itself is one paragraph.
"""

import logging
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities.warnings import PossibleUserWarning

_OURS = Path(__file__).parents[1]


class Unwanted(NamedTuple):
    """A warning that is left out.

    Attributes:
        category: its class.
        module: regular expression for the module that is warned of.
        message: regular expression for the beginning; empty where the class and the module are enough.
        reason: why.
    """

    category: type[Warning]
    module: str
    message: str
    reason: str


WARNINGS = (
    Unwanted(
        PossibleUserWarning,
        r"lightning\.pytorch\.trainer\.connectors\.data_connector",
        r"(The '\w+' does not have many workers|Consider setting `persistent_workers)",
        "data.num_workers is a choice, and images that are held in memory need none",
    ),
    Unwanted(
        PossibleUserWarning,
        r"lightning\.pytorch\.loops\.fit_loop",
        "",
        "the number of batches is random here, and modules in evaluation mode are named by the run itself",
    ),
    Unwanted(
        PossibleUserWarning,
        r"lightning\.pytorch\.trainer\.connectors\.logger_connector\.result",
        r"It is recommended to use `self\.log\('privacy/",
        "what the callbacks log is the same on every rank",
    ),
    Unwanted(
        UserWarning,
        r"lightning\.pytorch\.callbacks\.model_checkpoint",
        "(Checkpoint directory .* exists and is not empty|The dirpath has changed from)",
        "a run that resumes writes beside its earlier checkpoints, or into a new folder",
    ),
    Unwanted(
        UserWarning,
        r"lightning\.pytorch\.cli",
        ".* will be overridden by `",
        "the classifiers have an optimizer for plain Trainers, and that of the configuration replaces it",
    ),
    Unwanted(
        UserWarning,
        r"lightning\.fabric\.utilities\.seed",
        "No seed found",
        "the configuration of the run has the seed, and the guarantee does not depend on it",
    ),
    Unwanted(FutureWarning, r"lightning\.", ".*LeafSpec", "Lightning's use of torch's trees"),
    Unwanted(DeprecationWarning, r"(lightning|jsonargparse)\b", "", "Lightning's use of jsonargparse"),
)

#: Functions of Lightning whose notes are left out, by the end of their file's path, with the reason.
NOTES = {
    ("connectors/callback_connector.py", "_maybe_show_litmodels_tip"): "an advertisement",
    ("logger_connector/logger_connector.py", "configure_logger"): "an advertisement",
    ("trainer/setup.py", "_log_device_info"): "a run names the devices in use",
    ("accelerators/cuda.py", "set_nvidia_flags"): "the same for each device",
    ("utilities/distributed.py", "_init_dist_connection"): "the same for each process",
    ("connectors/accelerator_connector.py", "_check_and_init_precision"): "a run names the precision",
    ("utilities/seed.py", "seed_everything"): "the seed is in the configuration",
    ("loops/fit_loop.py", "done"): "a run says how many steps were taken",
    ("trainer/trainer.py", "estimated_stepping_batches"): "every private run asks for its number of steps",
    ("connectors/checkpoint_connector.py", "resume_start"): "what it says is said again when the checkpoint is read",
    ("connectors/signal_connector.py", "_sigterm_notifier_fn"): "a run that a signal ends says so itself",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context, what is named above is left out; it may not be entered twice."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for kind in WARNINGS:
            warnings.filterwarnings("ignore", kind.message, kind.category, kind.module)
        before, warnings.formatwarning = warnings.formatwarning, _formatted  # type: ignore[assignment]
        stack.callback(setattr, warnings, "formatwarning", before)
        for logger in (logging.root, *map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))):
            for handler in logger.handlers:
                handler.addFilter(_is_wanted)
                stack.callback(handler.removeFilter, _is_wanted)
                if logger is not logging.root and type(handler) is logging.StreamHandler:
                    stack.callback(handler.setStream, handler.stream)
                    handler.setStream(_StandardError())
        yield


class _StandardError:
    """Standard error as it is when something is written, since a live display puts another object in its place."""

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr, name)


def _is_wanted(record: logging.LogRecord) -> bool:
    path = Path(record.pathname).as_posix()
    return not any(path.endswith(f"/{file}") and record.funcName == function for file, function in NOTES)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of dp_lightning without the place in its code; any other as Python shows it."""
    if not Path(filename).resolve().is_relative_to(_OURS):
        return f"{filename}:{lineno}: {category.__name__}: {message}\n"
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 80
    return textwrap.fill(f"Warning: {message}", width, break_long_words=False, break_on_hyphens=False) + "\n"
